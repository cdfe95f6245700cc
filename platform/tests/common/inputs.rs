//! Inputs of the kernel tests: weights of every format, activations, and memory that faults where a
//! slice ends.

#![allow(dead_code, reason = "every test program uses its own part")]

use leanstream::cpu::{Act, Kernels};
use leanstream_core::quant::{QuantType, check};

/// Deterministic numbers, good enough for tests (xorshift64*).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    /// About normal, from -6 to 6.
    pub fn normal(&mut self) -> f32 {
        (0..12)
            .map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32)
            .sum::<f32>()
            - 6.0
    }
}

/// How the blocks of a matrix are filled.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Fill {
    /// Any codes; scales of either sign between 2^-10 and 1.
    Random,
    /// Every bit of every code and inner scale set.
    Highest,
    /// Every bit clear, scales too.
    Zero,
    /// Any codes, scales that are subnormal as halves.
    Subnormal,
    /// Any codes, the largest scales there are.
    Largest,
}

pub const FILLS: [Fill; 5] = [
    Fill::Random,
    Fill::Highest,
    Fill::Zero,
    Fill::Subnormal,
    Fill::Largest,
];

/// Where a block keeps its halves.
pub fn halves(ty: QuantType) -> &'static [usize] {
    match ty {
        QuantType::Q4_0 | QuantType::Q5_0 | QuantType::Q8_0 | QuantType::IQ4_NL => &[0],
        QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => &[0, 2],
        QuantType::Q2_K => &[80, 82],
        QuantType::Q3_K => &[108],
        QuantType::Q6_K => &[208],
        QuantType::F16 => &[0],
        QuantType::F32 | QuantType::BF16 | QuantType::MXFP4 => &[],
    }
}

/// `rows` rows of blocks, after `skew` bytes that don't belong to them.
pub fn weights(
    ty: QuantType,
    rows: usize,
    cols: usize,
    fill: Fill,
    skew: usize,
    random: &mut Random,
) -> Vec<u8> {
    let mut bytes = vec![0xa5; skew];
    let blocks = rows * cols / ty.block_len();
    for _ in 0..blocks {
        let start = bytes.len();
        bytes.extend((0..ty.block_bytes()).map(|_| match fill {
            Fill::Highest => 0xff,
            Fill::Zero => 0,
            _ => random.bits() as u8,
        }));
        let block = &mut bytes[start..];
        for &at in halves(ty) {
            let r = random.bits() as u16;
            let half = match fill {
                Fill::Zero => 0,
                Fill::Subnormal => r & 0x83ff,
                Fill::Largest => r & 0x8000 | 0x7bff,
                Fill::Random | Fill::Highest => r & 0x83ff | (5 + r % 10) << 10,
            };
            block[at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
        let exponent = match fill {
            Fill::Zero | Fill::Subnormal => random.below(4) as u8,
            Fill::Largest => 200,
            Fill::Random | Fill::Highest => 115 + random.below(12) as u8,
        };
        match ty {
            QuantType::MXFP4 => block[0] = exponent,
            // Sign and low mantissa stay as they are.
            QuantType::F32 => {
                block[2] = block[2] & 0x7f | exponent << 7;
                block[3] = block[3] & 0x80 | exponent >> 1;
            }
            QuantType::BF16 => {
                block[0] = block[0] & 0x7f | exponent << 7;
                block[1] = block[1] & 0x80 | exponent >> 1;
            }
            _ => {}
        }
    }
    assert_eq!(check(ty, &bytes[skew..]), Ok(()), "{ty} {fill:?}");
    bytes
}

/// Activations of some tokens in both forms.
pub struct Acts {
    pub cols: usize,
    pub tokens: usize,
    pub x: Vec<f32>,
    pub codes: Vec<i8>,
    pub scales: Vec<f32>,
    pub sums: Vec<i16>,
}

impl Acts {
    pub fn new(kernels: &Kernels, cols: usize, x: Vec<f32>) -> Self {
        let n = x.len();
        let mut acts = Self {
            cols,
            tokens: n / cols,
            x,
            codes: vec![0; n],
            scales: vec![0.0; n / 32],
            sums: vec![0; n / 16],
        };
        kernels.quantize(&acts.x, &mut acts.codes, &mut acts.scales, &mut acts.sums);
        acts
    }

    pub fn random(kernels: &Kernels, cols: usize, tokens: usize, random: &mut Random) -> Self {
        let x = (0..cols * tokens).map(|_| random.normal()).collect();
        Self::new(kernels, cols, x)
    }

    pub fn act(&self) -> Act<'_> {
        self.part(0, self.tokens)
    }

    pub fn part(&self, from: usize, to: usize) -> Act<'_> {
        let (from, n) = (from, to - from);
        let (a, b) = (from * self.cols, (from + n) * self.cols);
        Act {
            cols: self.cols,
            tokens: n,
            x: &self.x[a..b],
            codes: &self.codes[a..b],
            scales: &self.scales[a / 32..b / 32],
            sums: &self.sums[a / 16..b / 16],
        }
    }
}

/// Bytes that end where memory ends: reading past them is a fault.
pub struct Guarded {
    map: *mut libc::c_void,
    size: usize,
    len: usize,
}

impl Guarded {
    pub fn new(bytes: &[u8]) -> Self {
        const PAGE: usize = 1 << 16;
        let size = bytes.len().next_multiple_of(PAGE);
        // SAFETY: fresh memory of our own, whose last page is then taken away.
        unsafe {
            let map = libc::mmap(
                std::ptr::null_mut(),
                size + PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(map, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(map.byte_add(size), PAGE, libc::PROT_NONE), 0);
            let start = map.byte_add(size - bytes.len()).cast::<u8>();
            start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Self {
                map,
                size: size + PAGE,
                len: bytes.len(),
            }
        }
    }

    pub fn of<T: Copy>(values: &[T]) -> Self {
        // SAFETY: numbers are bytes.
        Self::new(unsafe {
            std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values))
        })
    }

    pub fn bytes(&self) -> &[u8] {
        self.values()
    }

    pub fn values<T: Copy>(&self) -> &[T] {
        const PAGE: usize = 1 << 16;
        // SAFETY: these bytes were copied in, from numbers of this type; the end is aligned.
        unsafe {
            let start = self.map.byte_add(self.size - PAGE - self.len).cast::<T>();
            std::slice::from_raw_parts(start, self.len / size_of::<T>())
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: our own map; nobody borrows from it any more.
        unsafe { libc::munmap(self.map, self.size) };
    }
}
