//! How fast activations are saved and loaded: `cargo bench --bench activations -- [filter ...]`.
//!
//! GB of f32 a second on one thread, for tiles of 64 tokens by 576 features: one that stays in the cache, as it
//! does where a kernel has just made it, and a new one from memory each time. What is decoded goes to one place, from
//! where a kernel takes it. A line is measured when it contains, for every filter, one of the filter's
//! comma-separated parts.
//!
//! `copy` is a memcpy of the tile. `naive` is dynamic quantization as it is written first: a pass for the tensor's
//! minimum and maximum, one to quantize to bytes, one to pack them, a new buffer for each, and the reverse to decode. Its
//! minimum and scale are the whole tile's, which is less work, and far less exact. `naive scalar` is what a
//! plain build makes of it; it is also compiled for the other instruction sets, in loops that the compiler turns
//! into vectors. `naive-nearest` rounds to nearest, without drawing.

use std::hint::black_box;

use leanstream::cpu::Isa;
use leanstream::cpu::vector::Vector;
use leanstream::tune::act::codec::{Coding, Run};
use leanstream_core::act::codec::{Bits, Counter, Grouping, Key, Meta};
use nix::time::{ClockId, clock_gettime};

const ROWS: usize = 64;
const COLS: usize = 576;
const LEN: usize = ROWS * COLS;
/// Tiles that don't fit into any cache together.
const MANY: usize = 1280;
/// Seconds a number takes, about.
const SECONDS: f64 = 0.2;

const COUNTER: Counter = Counter {
    seed: 1,
    step: 1,
    tensor: 1,
};

fn main() {
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let wanted = |line: &str| {
        filters
            .iter()
            .all(|f| f.split(',').any(|part| line.contains(part)))
    };
    let tensors: Vec<Vec<f32>> = (0..MANY).map(tensor).collect();
    let mut out = vec![vec![0.0; LEN]; MANY];
    println!("GB/s of f32, one thread        in cache              from memory");
    println!("                           encode decode shrink   encode decode shrink");
    let report = |name: &str, numbers: [[f64; 3]; 2]| {
        print!("{name:25}");
        for group in numbers {
            for number in group {
                if number > 0.0 {
                    print!(" {number:6.2}");
                } else {
                    print!("      -");
                }
            }
            print!("  ");
        }
        println!();
    };
    if wanted("copy") {
        let copy = [1, MANY].map(|many| {
            let speed = speed(many, |i| out[i].copy_from_slice(&tensors[i]));
            [speed, speed, 0.0]
        });
        report("copy", copy);
    }
    for v in Vector::available() {
        for bits in Bits::ALL.into_iter().rev() {
            let name = |kind: &str| format!("{kind} {} {} bits", v.isa(), bits.get());
            if wanted(&name("ours")) {
                let ours = [1, MANY].map(|many| ours(v, bits, &tensors, &mut out[0], many));
                report(&name("ours"), ours);
            }
            for (kind, draws) in [("naive", true), ("naive-nearest", false)] {
                if wanted(&name(kind)) {
                    let key = draws.then(|| COUNTER.rounding());
                    let naive = [1, MANY].map(|many| {
                        let mut kept: Vec<Option<Packed>> = (0..many).map(|_| None).collect();
                        let encode = speed(many, |i| {
                            kept[i] = Some(encode(v.isa(), &tensors[i], bits, key))
                        });
                        let decode = speed(many, |i| {
                            let packed = kept[i].as_ref().expect("all were encoded");
                            black_box(decode(v.isa(), packed, bits));
                        });
                        [encode, decode, 0.0]
                    });
                    report(&name(kind), naive);
                }
            }
        }
        let name = format!("ours {} bf16", v.isa());
        if wanted(&name) {
            let mut kept = vec![vec![0; 2 * LEN]; MANY];
            let numbers = [1, MANY].map(|many| {
                let encode = speed(many, |i| v.to_bf16(&tensors[i], &mut kept[i]));
                let decode = speed(many, |i| v.from_bf16(&kept[i], &mut out[0]));
                [encode, decode, 0.0]
            });
            report(&name, numbers);
        }
    }
}

fn ours(v: Vector, bits: Bits, tensors: &[Vec<f32>], out: &mut [f32], many: usize) -> [f64; 3] {
    let grouping = Grouping::of(COLS);
    let run = Run {
        grouping,
        first: 0,
        groups: grouping.groups(ROWS),
    };
    let mut metas = vec![vec![Meta::default(); run.groups]; many];
    let mut codes = vec![vec![0; bits.bytes(run.codes())]; many];
    let coding = Coding {
        bits,
        key: COUNTER.rounding(),
    };
    let encode = speed(many, |i| {
        let pages = &mut [&mut codes[i][..]];
        v.quantize(run, coding, &tensors[i], &mut metas[i], pages)
            .expect("finite");
    });
    let decode = speed(many, |i| {
        v.dequantize(run, bits, bits, &metas[i], &[&codes[i]], out);
    });
    let shrink = match bits {
        Bits::One => 0.0,
        Bits::Two => shrink(v, bits, Bits::One, &mut codes),
        Bits::Four => shrink(v, bits, Bits::Two, &mut codes),
        Bits::Eight => shrink(v, bits, Bits::Four, &mut codes),
    };
    [encode, decode, shrink]
}

fn shrink(v: Vector, from: Bits, to: Bits, codes: &mut [Vec<u8>]) -> f64 {
    let key = COUNTER.shrinking(from, to);
    speed(codes.len(), |i| {
        let elements = from.elements(codes[i].len());
        v.shrink_codes(elements, from, to, key, 0, &mut [&mut codes[i][..]]);
    })
}

/// GB of f32 a second of a step over tensor after tensor of `many`: of this thread's time, so that what else
/// the machine does counts less.
fn speed(many: usize, mut step: impl FnMut(usize)) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has it");
        time.tv_sec() as f64 + time.tv_nsec() as f64 * 1e-9
    };
    (0..many).for_each(&mut step);
    let start = now();
    let mut rounds = 0;
    while now() - start < SECONDS {
        (0..many).for_each(&mut step);
        rounds += 1;
    }
    (rounds * many * LEN * 4) as f64 / (now() - start) / 1e9
}

/// Bell-shaped numbers, another `seed` others.
fn tensor(seed: usize) -> Vec<f32> {
    let counter = Counter {
        seed: seed as u64,
        ..COUNTER
    };
    let key = counter.rounding();
    (0..LEN)
        .map(|i| {
            let sum: u32 = (0..4).map(|j| key.word(4 * i as u32 + j) >> 20).sum();
            sum as f32 / 2048.0 - 4.0
        })
        .collect()
}

/// What naive quantization keeps of a tensor.
struct Packed {
    min: f32,
    scale: f32,
    bytes: Vec<u8>,
}

// Plain loops without closures, which the compiler turns into vectors of the instruction set that they
// are compiled for; the minimum in 32 lanes, since it may not reorder one chain of comparisons.

#[inline(always)]
fn encode_body(x: &[f32], bits: Bits, key: Option<Key>) -> Packed {
    let (mut low, mut high) = ([f32::MAX; 32], [f32::MIN; 32]);
    for x in x.as_chunks::<32>().0 {
        for i in 0..32 {
            low[i] = if x[i] < low[i] { x[i] } else { low[i] };
            high[i] = if x[i] > high[i] { x[i] } else { high[i] };
        }
    }
    let (min, max) = (
        low.into_iter().fold(f32::MAX, f32::min),
        high.into_iter().fold(f32::MIN, f32::max),
    );
    let steps = bits.steps() as f32;
    let scale = (max - min) / steps;
    let inverse = 1.0 / scale;
    let mut codes = vec![0u8; x.len()];
    match key {
        None => {
            for (code, x) in codes.iter_mut().zip(x) {
                let at = (x - min) * inverse + 0.5;
                *code = whole(if at < steps { at } else { steps });
            }
        }
        Some(key) => {
            let sixteens = codes.as_chunks_mut::<16>().0.iter_mut();
            for (c, (codes, x)) in sixteens.zip(x.as_chunks::<16>().0).enumerate() {
                for i in 0..16 {
                    let word = key.word(16 * c as u32 + i as u32);
                    let u = (word >> 8).cast_signed() as f32 * (1.0 / (1 << 24) as f32);
                    let at = (x[i] - min) * inverse + u;
                    codes[i] = whole(if at < steps { at } else { steps });
                }
            }
        }
    }
    let mut bytes = vec![0u8; bits.bytes(x.len())];
    match bits {
        Bits::One => pack::<8>(&codes, &mut bytes),
        Bits::Two => pack::<4>(&codes, &mut bytes),
        Bits::Four => pack::<2>(&codes, &mut bytes),
        Bits::Eight => pack::<1>(&codes, &mut bytes),
    }
    Packed { min, scale, bytes }
}

/// A cast without Rust's checks, which keep the loop from becoming vectors.
#[inline(always)]
fn whole(at: f32) -> u8 {
    // SAFETY: from 0 to 255: the minimum was subtracted, and the tensors here are finite.
    unsafe { at.to_int_unchecked::<i32>() as u8 }
}

/// `N` codes a byte.
#[inline(always)]
fn pack<const N: usize>(codes: &[u8], bytes: &mut [u8]) {
    for (byte, codes) in bytes.iter_mut().zip(codes.as_chunks::<N>().0) {
        for (i, code) in codes.iter().enumerate() {
            *byte |= code << (i * 8 / N);
        }
    }
}

#[inline(always)]
fn decode_body(packed: &Packed, bits: Bits) -> Vec<f32> {
    let mut codes = vec![0u8; bits.elements(packed.bytes.len())];
    match bits {
        Bits::One => unpack::<8>(&packed.bytes, &mut codes),
        Bits::Two => unpack::<4>(&packed.bytes, &mut codes),
        Bits::Four => unpack::<2>(&packed.bytes, &mut codes),
        Bits::Eight => unpack::<1>(&packed.bytes, &mut codes),
    }
    let mut out = vec![0.0; codes.len()];
    for (out, &code) in out.iter_mut().zip(&codes) {
        *out = packed.min + packed.scale * f32::from(code);
    }
    out
}

/// `N` codes a byte.
#[inline(always)]
fn unpack<const N: usize>(bytes: &[u8], codes: &mut [u8]) {
    for (byte, codes) in bytes.iter().zip(codes.as_chunks_mut::<N>().0) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = byte >> (i * 8 / N) & (0xffu16 >> (8 - 8 / N)) as u8;
        }
    }
}

/// The two above, compiled for an instruction set.
macro_rules! naive_for {
    ($encode:ident, $decode:ident, $features:literal) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $encode(x: &[f32], bits: Bits, key: Option<Key>) -> Packed {
            encode_body(x, bits, key)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $decode(packed: &Packed, bits: Bits) -> Vec<f32> {
            decode_body(packed, bits)
        }
    };
}

naive_for!(encode_avx2, decode_avx2, "avx2,fma,f16c");
naive_for!(
    encode_avx512,
    decode_avx512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);

fn encode(isa: Isa, x: &[f32], bits: Bits, key: Option<Key>) -> Packed {
    match isa {
        // SAFETY: only instruction sets that this machine has are measured.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => unsafe { encode_avx2(x, bits, key) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { encode_avx512(x, bits, key) },
        _ => encode_body(x, bits, key),
    }
}

fn decode(isa: Isa, packed: &Packed, bits: Bits) -> Vec<f32> {
    match isa {
        // SAFETY: as in `encode`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => unsafe { decode_avx2(packed, bits) },
        // SAFETY: as in `encode`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { decode_avx512(packed, bits) },
        _ => decode_body(packed, bits),
    }
}
