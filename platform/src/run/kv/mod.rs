//! The KV cache: keys and values of past tokens, as half floats or 8-bit blocks, in memory that the
//! caller gave.
//!
//! Each layer has a capacity, a multiple of [`BLOCK`] positions, and position `p` lies in slot
//! `p % capacity`: a layer with full attention holds the whole context, one with a sliding window is
//! a ring. Slots are kept in blocks of [`BLOCK`], so the positions `64 b .. 64 b + 64` always lie
//! together, and attention may go block by block at places that no ring size moves.
//!
//! Layout, per layer: keys (kv_heads, blocks), then values (kv_heads, blocks). A block is one of
//!
//! | block | f16 | q8_0 |
//! |---|---|---|
//! | keys | f16 (head_dim, 64) | f16 scales (head_dim / 32, 64), then i8 (head_dim, 64) |
//! | values | f16 (64, head_dim rounded up to 16) | f16 scales (64, head_dim / 32), then i8 (64, head_dim) |
//!
//! Keys are transposed: scores are computed for a vector of positions at a time, and each score sums
//! over `head_dim` in order, whatever the width of the vector. That is what makes one token's result
//! the same bits alone and in a batch.

mod layout;
mod store;

use std::ops::Range;

use memmap2::MmapMut;

pub use layout::{KvError, KvLayout, KvType, ring_capacity};

use crate::cpu::vector::Vector;
use layout::Layer;
use store::{half_at, store_f16, store_q8};

/// Positions that lie together.
pub const BLOCK: usize = 64;
/// Elements that share a scale in [`KvType::Q8_0`].
const GROUP: usize = 32;
/// Alignment of blocks: a cache line.
const ALIGN: usize = 64;

/// The memory of a cache.
#[derive(Debug)]
pub enum KvRegion {
    /// On the heap.
    Heap(Vec<u8>),
    /// A mapping of its own, for huge pages or advice.
    Mapped(MmapMut),
}

impl From<Vec<u8>> for KvRegion {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Heap(bytes)
    }
}

impl From<MmapMut> for KvRegion {
    fn from(map: MmapMut) -> Self {
        Self::Mapped(map)
    }
}

/// The cache of one conversation.
#[derive(Debug)]
pub struct KvCache {
    layout: KvLayout,
    /// First aligned byte of the region; everything that follows is reached through it.
    start: *mut u8,
    /// Keeps the memory alive.
    _region: KvRegion,
}

// SAFETY: the cache owns its memory. Shared access only reads, but for `store_shared`, whose callers
// answer for what other threads do meanwhile.
unsafe impl Send for KvCache {}
// SAFETY: as above.
unsafe impl Sync for KvCache {}

impl KvCache {
    /// A cache in `region`, whose contents don't matter. Allocates nothing.
    ///
    /// # Errors
    /// [`KvError::Region`] if the region is smaller than [`KvLayout::bytes`].
    pub fn new(layout: KvLayout, region: impl Into<KvRegion>) -> Result<Self, KvError> {
        let mut region = region.into();
        let bytes: &mut [u8] = match &mut region {
            KvRegion::Heap(bytes) => bytes,
            KvRegion::Mapped(map) => map,
        };
        let (given, needed) = (bytes.len(), layout.bytes());
        if given < needed {
            return Err(KvError::Region { given, needed });
        }
        let skip = bytes.as_ptr().align_offset(ALIGN);
        assert!(skip < ALIGN, "bytes can always be aligned");
        Ok(Self {
            layout,
            start: bytes[skip..].as_mut_ptr(),
            _region: region,
        })
    }

    /// The sizes.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Store the key and value of one position in `layer`, of all heads.
    ///
    /// Shapes: `k` and `v` (kv_heads, head_dim). Overwrites position `position - capacity`.
    ///
    /// # Panics
    /// A length is wrong or there is no such layer.
    pub fn store(&mut self, vector: Vector, layer: usize, position: usize, k: &[f32], v: &[f32]) {
        let heads = 0..self.layout.kv_heads();
        // SAFETY: nobody else can use the cache while it is borrowed exclusively.
        unsafe { self.store_shared(vector, layer, heads, position, k, v) }
    }

    /// [`KvCache::store`] of some heads while other threads store other positions or other heads.
    ///
    /// Shapes: `k` and `v` (heads.len(), head_dim). Threads that store positions of one block of
    /// [`BLOCK`] share cache lines: correct, but cutting by head or by block is faster.
    ///
    /// # Safety
    /// While this runs, no other thread stores the same slot (`position % capacity`) of the same head
    /// and layer, and none reads any of the layer's slots in the same block (no attention runs over
    /// this layer).
    ///
    /// # Panics
    /// A length is wrong, or there is no such layer or head.
    pub unsafe fn store_shared(
        &self,
        vector: Vector,
        layer: usize,
        heads: Range<usize>,
        position: usize,
        k: &[f32],
        v: &[f32],
    ) {
        let head_dim = self.layout.head_dim();
        assert!(heads.end <= self.layout.kv_heads(), "heads of the cache");
        assert_eq!(k.len(), heads.len() * head_dim, "keys of every head");
        assert_eq!(v.len(), heads.len() * head_dim, "values of every head");
        let slot = position % BLOCK;
        let rows = k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim));
        for (head, (k, v)) in heads.zip(rows) {
            let (keys, values) = self.block(layer, head, position / BLOCK);
            // SAFETY: both point to whole blocks of this cache, in which the caller vouches that
            // this slot is ours alone.
            unsafe {
                match self.layout.ty() {
                    KvType::F16 => store_f16(vector, keys, values, slot, k, v),
                    KvType::Q8_0 => store_q8(vector, keys, values, slot, k, v),
                }
            }
        }
    }

    /// Read back what `position` holds for one head: for tests, dumps and saved conversations.
    ///
    /// Shapes: `k` and `v` (head_dim).
    ///
    /// # Panics
    /// A length is wrong, or there is no such layer or head.
    pub fn load(&self, layer: usize, head: usize, position: usize, k: &mut [f32], v: &mut [f32]) {
        let head_dim = self.layout.head_dim();
        assert_eq!(k.len(), head_dim, "one key");
        assert_eq!(v.len(), head_dim, "one value");
        let (keys, values) = self.block(layer, head, position / BLOCK);
        let slot = position % BLOCK;
        for (d, (k, v)) in k.iter_mut().zip(v).enumerate() {
            // SAFETY: the indices are inside the blocks, by the layout at the top of this file.
            unsafe {
                match self.layout.ty() {
                    KvType::F16 => {
                        let width = head_dim.next_multiple_of(16);
                        *k = half_at(keys, d * BLOCK + slot);
                        *v = half_at(values, slot * width + d);
                    }
                    KvType::Q8_0 => {
                        let groups = head_dim / GROUP;
                        let codes = groups * BLOCK * 2;
                        let code = |block: *const u8, at: usize| {
                            f32::from(block.add(codes + at).cast::<i8>().read())
                        };
                        *k = code(keys, d * BLOCK + slot) * half_at(keys, d / GROUP * BLOCK + slot);
                        *v = code(values, slot * head_dim + d)
                            * half_at(values, slot * groups + d / GROUP);
                    }
                }
            }
        }
    }

    /// The blocks of keys and values in which `block`, counted from position 0, lies.
    pub(crate) fn block(&self, layer: usize, head: usize, block: usize) -> (*mut u8, *mut u8) {
        let layout = &self.layout;
        let Layer {
            capacity,
            keys,
            values,
        } = layout.layers[layer];
        assert!(head < layout.kv_heads(), "a head of the cache");
        let blocks = capacity / BLOCK;
        let at = head * blocks + block % blocks;
        // SAFETY: `at` is a block of this layer, and the layout's bytes fit the region.
        unsafe {
            (
                self.start.add(keys + at * layout.key_block),
                self.start.add(values + at * layout.value_block),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::{Random, close};
    use half::f16;

    fn cache(ty: KvType, kv_heads: usize, head_dim: usize, capacities: &[usize]) -> KvCache {
        let layout =
            KvLayout::new(ty, kv_heads, head_dim, capacities.iter().copied()).expect("a layout");
        let region = vec![0xff; layout.bytes()];
        KvCache::new(layout, region).expect("a cache")
    }

    #[test]
    fn every_position_of_every_head_and_layer_is_kept_apart() {
        for (ty, head_dim) in [(KvType::F16, 20), (KvType::F16, 64), (KvType::Q8_0, 96)] {
            let mut cache = cache(ty, 2, head_dim, &[130, 64]);
            let mut random = Random(9);
            let mut stored = Vec::new();
            for position in 0..130 {
                for layer in 0..2 {
                    let k = random.floats(2 * head_dim, 3.0);
                    let v = random.floats(2 * head_dim, 3.0);
                    cache.store(Vector::detect(), layer, position, &k, &v);
                    stored.push((layer, position, k, v));
                }
            }
            let (mut k, mut v) = (vec![0.0; head_dim], vec![0.0; head_dim]);
            for (layer, position, want_k, want_v) in stored {
                if layer == 1 && position < 130 - 64 {
                    continue; // the ring went round
                }
                for head in 0..2 {
                    cache.load(layer, head, position, &mut k, &mut v);
                    let part = head * head_dim..(head + 1) * head_dim;
                    let pairs = k.iter().zip(&want_k[part.clone()]);
                    for (got, want) in pairs.chain(v.iter().zip(&want_v[part])) {
                        match ty {
                            KvType::F16 => assert_eq!(*got, f16::from_f32(*want).to_f32()),
                            // Half a step, and the rounding of the scale.
                            KvType::Q8_0 => close(*got, f64::from(*want), 5e-4, 3.0 / 254.0),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn threads_may_store_heads_and_positions_side_by_side() {
        let cache = cache(KvType::F16, 2, 32, &[64]);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let cache = &cache;
                scope.spawn(move || {
                    for position in (thread / 2..64).step_by(2) {
                        let x = [(position * 2 + thread % 2) as f32; 32];
                        let head = thread % 2..thread % 2 + 1;
                        // SAFETY: a thread has one head and every second position to itself.
                        unsafe {
                            cache.store_shared(Vector::detect(), 0, head, position, &x, &x);
                        }
                    }
                });
            }
        });
        for position in 0..64 {
            for head in 0..2 {
                let (mut k, mut v) = ([0.0; 32], [0.0; 32]);
                cache.load(0, head, position, &mut k, &mut v);
                assert_eq!(k, [(position * 2 + head) as f32; 32]);
                assert_eq!(v, k);
            }
        }
    }

    #[test]
    fn a_mapping_serves_as_well() {
        let layout = KvLayout::new(KvType::F16, 1, 16, [64]).unwrap();
        let map = MmapMut::map_anon(layout.bytes()).unwrap();
        let mut cache = KvCache::new(layout, map).unwrap();
        cache.store(Vector::detect(), 0, 7, &[1.5; 16], &[2.5; 16]);
        let (mut k, mut v) = ([0.0; 16], [0.0; 16]);
        cache.load(0, 0, 7, &mut k, &mut v);
        assert_eq!((k, v), ([1.5; 16], [2.5; 16]));
    }
}
