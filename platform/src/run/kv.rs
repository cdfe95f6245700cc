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

use std::fmt;
use std::ops::Range;

use half::f16;
use memmap2::MmapMut;

use crate::cpu::vector::Vector;

/// Positions that lie together.
pub const BLOCK: usize = 64;
/// Elements that share a scale in [`KvType::Q8_0`].
const GROUP: usize = 32;
/// Alignment of blocks: a cache line.
const ALIGN: usize = 64;

/// Element type of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvType {
    /// IEEE binary16, rounded to nearest even; 2 bytes. Values beyond 65504 are kept at that.
    F16,
    /// Blocks of 32 8-bit codes with an f16 scale; 34 bytes per 32. `head_dim` is a multiple of 32.
    #[allow(non_camel_case_types)]
    Q8_0,
}

impl KvType {
    /// ggml's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// The type called `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F16, Self::Q8_0]
            .into_iter()
            .find(|ty| ty.name() == name)
    }
}

/// Why a cache can't be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvError {
    /// A q8_0 cache needs heads of whole blocks.
    HeadDim {
        /// Elements of a head.
        head_dim: usize,
    },
    /// The sizes multiply beyond what an address can hold.
    TooLarge,
    /// The region is smaller than [`KvLayout::bytes`].
    Region {
        /// Bytes given.
        given: usize,
        /// Bytes needed.
        needed: usize,
    },
}

impl fmt::Display for KvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeadDim { head_dim } => write!(
                f,
                "a q8_0 KV cache needs a head size that is a multiple of 32, not {head_dim}; use an f16 cache"
            ),
            Self::TooLarge => write!(
                f,
                "the KV cache is larger than the address space; use a shorter context"
            ),
            Self::Region { given, needed } => {
                write!(f, "the KV cache needs {needed} bytes and was given {given}")
            }
        }
    }
}

impl std::error::Error for KvError {}

/// Positions that a layer with a sliding window must hold so that batches of up to `batch_max` tokens
/// can be stored before they attend; never more than the whole `context`.
#[must_use]
pub fn ring_capacity(window: usize, batch_max: usize, context: usize) -> usize {
    window.saturating_add(batch_max).min(context)
}

/// The sizes of a cache: computed before anything is allocated, for the ledger.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvLayout {
    ty: KvType,
    kv_heads: usize,
    head_dim: usize,
    key_block: usize,
    value_block: usize,
    layers: Box<[Layer]>,
    bytes: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layer {
    /// Positions, a multiple of `BLOCK`.
    capacity: usize,
    /// Offsets of the keys and values.
    keys: usize,
    values: usize,
}

impl KvLayout {
    /// A cache of one layer for each of `capacities` (in positions, rounded up to [`BLOCK`]).
    ///
    /// # Errors
    /// [`KvError::HeadDim`] or [`KvError::TooLarge`].
    pub fn new(
        ty: KvType,
        kv_heads: usize,
        head_dim: usize,
        capacities: impl IntoIterator<Item = usize>,
    ) -> Result<Self, KvError> {
        let width = match ty {
            KvType::F16 => head_dim.checked_next_multiple_of(16),
            KvType::Q8_0 if head_dim.is_multiple_of(GROUP) => Some(head_dim),
            KvType::Q8_0 => return Err(KvError::HeadDim { head_dim }),
        };
        let block = |elements: usize| {
            let bytes = match ty {
                KvType::F16 => elements.checked_mul(2)?,
                KvType::Q8_0 => elements.checked_add(elements / GROUP * 2)?,
            };
            bytes.checked_mul(BLOCK)
        };
        let sizes = || {
            let (key_block, value_block) = (block(head_dim)?, block(width?)?);
            let mut bytes = ALIGN; // the region may start anywhere
            let mut layers = Vec::new();
            for capacity in capacities {
                let capacity = capacity.checked_next_multiple_of(BLOCK)?;
                let blocks = kv_heads.checked_mul(capacity / BLOCK)?;
                let keys = bytes;
                let values = keys.checked_add(blocks.checked_mul(key_block)?)?;
                bytes = values.checked_add(blocks.checked_mul(value_block)?)?;
                layers.push(Layer {
                    capacity,
                    keys: keys - ALIGN,
                    values: values - ALIGN,
                });
            }
            isize::try_from(bytes).ok()?;
            Some(Self {
                ty,
                kv_heads,
                head_dim,
                key_block,
                value_block,
                layers: layers.into(),
                bytes,
            })
        };
        sizes().ok_or(KvError::TooLarge)
    }

    /// Bytes of the region that [`KvCache::new`] wants.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Positions that layer `layer` holds: what was asked for, rounded up to [`BLOCK`].
    #[must_use]
    pub fn capacity(&self, layer: usize) -> usize {
        self.layers[layer].capacity
    }

    /// Element type.
    #[must_use]
    pub fn ty(&self) -> KvType {
        self.ty
    }

    /// Heads of keys and values.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Elements of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }
}

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
        let heads = 0..self.layout.kv_heads;
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
        let head_dim = self.layout.head_dim;
        assert!(heads.end <= self.layout.kv_heads, "heads of the cache");
        assert_eq!(k.len(), heads.len() * head_dim, "keys of every head");
        assert_eq!(v.len(), heads.len() * head_dim, "values of every head");
        let slot = position % BLOCK;
        let rows = k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim));
        for (head, (k, v)) in heads.zip(rows) {
            let (keys, values) = self.block(layer, head, position / BLOCK);
            // SAFETY: both point to whole blocks of this cache, in which the caller vouches that
            // this slot is ours alone.
            unsafe {
                match self.layout.ty {
                    KvType::F16 => store_f16(vector, keys, values, slot, k, v),
                    KvType::Q8_0 => store_q8(keys, values, slot, k, v),
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
        let head_dim = self.layout.head_dim;
        assert_eq!(k.len(), head_dim, "one key");
        assert_eq!(v.len(), head_dim, "one value");
        let (keys, values) = self.block(layer, head, position / BLOCK);
        let slot = position % BLOCK;
        for (d, (k, v)) in k.iter_mut().zip(v).enumerate() {
            // SAFETY: the indices are inside the blocks, by the layout at the top of this file.
            unsafe {
                match self.layout.ty {
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
        assert!(head < layout.kv_heads, "a head of the cache");
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

/// One half float of a block.
///
/// # Safety
/// `block` is aligned to 2 and has element `at`.
unsafe fn half_at(block: *const u8, at: usize) -> f32 {
    // SAFETY: the caller vouches for the element.
    f16::from_bits(unsafe { block.cast::<u16>().add(at).read() }).to_f32()
}

/// # Safety
/// `keys` and `values` are f16 blocks for heads of `k.len()`, whose `slot` is the caller's alone.
unsafe fn store_f16(
    vector: Vector,
    keys: *mut u8,
    values: *mut u8,
    slot: usize,
    k: &[f32],
    v: &[f32],
) {
    let keys = keys.cast::<u16>();
    let mut bits = [0; BLOCK];
    for (first, k) in (0..).step_by(BLOCK).zip(k.chunks(BLOCK)) {
        let bits = &mut bits[..k.len()];
        vector.to_f16(k, bits);
        for (d, bits) in (first..).zip(bits) {
            // SAFETY: inside the block, in our slot.
            unsafe { keys.add(d * BLOCK + slot).write(*bits) };
        }
    }
    let width = v.len().next_multiple_of(16);
    // SAFETY: our slot's row, which lies in the block.
    let row =
        unsafe { std::slice::from_raw_parts_mut(values.cast::<u16>().add(slot * width), width) };
    let (row, padding) = row.split_at_mut(v.len());
    vector.to_f16(v, row);
    // Vectors run over the padding; it need only be finite.
    padding.fill(0);
}

/// # Safety
/// `keys` and `values` are q8_0 blocks for heads of `k.len()`, whose `slot` is the caller's alone.
unsafe fn store_q8(keys: *mut u8, values: *mut u8, slot: usize, k: &[f32], v: &[f32]) {
    let (head_dim, groups) = (k.len(), k.len() / GROUP);
    let (k, _) = k.as_chunks::<GROUP>();
    let (v, _) = v.as_chunks::<GROUP>();
    for group in 0..groups {
        let (key_scale, key_codes) = quantize(&k[group]);
        let (value_scale, value_codes) = quantize(&v[group]);
        // SAFETY: all inside the blocks, in our slot, by the layout at the top of this file.
        unsafe {
            keys.cast::<u16>()
                .add(group * BLOCK + slot)
                .write(key_scale);
            values
                .cast::<u16>()
                .add(slot * groups + group)
                .write(value_scale);
            let codes = keys.add(groups * BLOCK * 2).cast::<i8>();
            for (d, code) in (group * GROUP..).zip(key_codes) {
                codes.add(d * BLOCK + slot).write(code);
            }
            let codes = values.add(groups * BLOCK * 2).cast::<i8>();
            let row = codes.add(slot * head_dim + group * GROUP);
            row.cast::<[i8; GROUP]>().write(value_codes);
        }
    }
}

/// 32 floats as an f16 scale (bits) and codes in `-127 ..= 127`: the scale is the largest absolute
/// value over 127, and codes are rounded by the scale as stored. NaN anywhere makes the scale NaN.
fn quantize(x: &[f32; GROUP]) -> (u16, [i8; GROUP]) {
    let mut top = 0.0f32;
    for x in x {
        // The comparison is false for NaN in either, so NaN comes and stays.
        let size = x.abs();
        top = if size <= top { top } else { size };
        if top.is_nan() {
            return (f16::NAN.to_bits(), [0; GROUP]);
        }
    }
    let scale = f16::from_f32((top / 127.0).min(f16::MAX.to_f32()));
    let inverse = match scale.to_f32() {
        0.0 => 0.0,
        scale => 1.0 / scale,
    };
    // `as` saturates at the ends of i8; -128 can't come up, for rounding of the scale costs little.
    let codes = x.map(|x| (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8);
    (scale.to_bits(), codes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::{Random, close};

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
    fn bytes_are_those_of_the_elements_and_one_line() {
        let layout = KvLayout::new(KvType::F16, 3, 64, [512; 30]).unwrap();
        assert_eq!(layout.bytes(), 30 * 2 * 3 * 512 * 64 * 2 + 64);
        let layout = KvLayout::new(KvType::Q8_0, 3, 64, [500; 30]).unwrap();
        assert_eq!(layout.bytes(), 30 * 2 * 3 * 512 * 68 + 64);
        assert_eq!(layout.capacity(0), 512);
        let layout = KvLayout::new(KvType::F16, 1, 20, [64]).unwrap();
        assert_eq!(layout.bytes(), 64 * (20 + 32) * 2 + 64);
        assert_eq!(ring_capacity(512, 256, 32_768), 768);
        assert_eq!(ring_capacity(512, 256, 600), 600);
    }

    #[test]
    fn errors_name_the_number_and_the_way_out() {
        let error = KvLayout::new(KvType::Q8_0, 1, 80, [64]).unwrap_err();
        assert!(error.to_string().contains("not 80"), "{error}");
        for (heads, head_dim, capacity) in [
            (usize::MAX, 64, 64),
            (1, usize::MAX - 63, 64),
            (1, 64, usize::MAX),
            (1 << 20, 1 << 20, 1 << 22),
        ] {
            let error = KvLayout::new(KvType::F16, heads, head_dim, [capacity]).unwrap_err();
            assert_eq!(error, KvError::TooLarge);
        }
        let layout = KvLayout::new(KvType::F16, 1, 64, [64]).unwrap();
        let needed = layout.bytes();
        let error = KvCache::new(layout, vec![0; needed - 1]).unwrap_err();
        let given = needed - 1;
        assert_eq!(error, KvError::Region { given, needed });
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

    #[test]
    fn quantization_of_hostile_groups() {
        let (scale, codes) = quantize(&[0.0; 32]);
        assert_eq!((scale, codes), (0, [0; 32]));
        let (scale, codes) = quantize(&[f32::INFINITY; 32]);
        assert_eq!((f16::from_bits(scale), codes), (f16::MAX, [127; 32]));
        let mut x = [1.0; 32];
        x[5] = f32::NAN;
        assert!(f16::from_bits(quantize(&x).0).is_nan());
        let (scale, codes) = quantize(&[1e-30; 32]);
        assert_eq!((scale, codes), (0, [0; 32]));
    }
}
