//! The kernels of convolutions, for one image and one thread.
//!
//! The input lies in planes, one a channel, so that neighbouring pixels are at constant distances; the
//! output and the packed weights have their channels innermost, so that a vector is one pixel's
//! channels. A tile is a few pixels of a row times up to two vectors, and stays in registers over all taps.

use crate::cpu::vector::lanes::{LANES_MAX, Lanes};
use crate::cpu::vector::multiversion;

/// Vectors of channels that a tile has at most.
const VECTORS: usize = 2;
/// Pixels that a tile has at most.
const PIXELS_MAX: usize = 14;

/// How outputs follow from an input in planes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plane {
    /// Output rows.
    pub rows: usize,
    /// Output pixels of a row.
    pub cols: usize,
    /// Input channels.
    pub ins: usize,
    /// Output channels.
    pub outs: usize,
    /// Rows and columns of the kernel.
    pub taps: [usize; 2],
    /// Input pixels from an output pixel's first tap to that of the next: 1 or 2, in both directions.
    pub step: usize,
    /// Where the first output's first tap lies in a plane.
    pub x_at: usize,
    /// Floats of a plane's row.
    pub x_row: usize,
    /// Floats of a plane.
    pub x_plane: usize,
    /// Where the first output pixel lies.
    pub y_at: usize,
    /// Floats from an output pixel to the next.
    pub y_step: usize,
    /// Floats from an output row to the next.
    pub y_row: usize,
}

impl Plane {
    /// Floats of one tap's weights of one input channel: output channels and padding.
    pub(super) fn width(&self) -> usize {
        self.outs.next_multiple_of(LANES_MAX)
    }

    /// Floats of all weights.
    pub(super) fn weights(&self) -> usize {
        self.taps[0] * self.taps[1] * self.ins * self.width()
    }

    fn is_empty(&self) -> bool {
        self.rows * self.cols * self.ins * self.outs * self.taps[0] * self.taps[1] == 0
    }

    /// Panics where a kernel would leave the slices.
    fn check(&self, x: usize, w: usize, y: usize) {
        let last = |count: usize, step: usize| (count - 1) * step;
        let x_last = self.x_at
            + last(self.ins, self.x_plane)
            + (last(self.rows, self.step) + last(self.taps[0], 1)) * self.x_row
            + last(self.cols, self.step)
            + last(self.taps[1], 1);
        let y_last = self.y_at + last(self.rows, self.y_row) + last(self.cols, self.y_step);
        assert!(x_last < x, "an input that holds every tap");
        assert!(y_last + self.outs <= y, "an output that holds every pixel");
        assert!(self.weights() <= w, "weights of every tap");
        assert!(self.step == 1 || self.step == 2, "strides of 1 and 2");
    }
}

multiversion! {
    /// `y (+)= sum over taps and input channels of w x`.
    ///
    /// Shapes: `x` (ins, rows, row) as `p` says, `w` (taps, taps, ins, width), `y` (rows, cols, outs) as `p` says.
    pub(super) fn convolve(p: &Plane, x: &[f32], w: &[f32], y: &mut [f32], add: bool) = convolve_body;
    /// `dw += sum over output pixels of x dy`, all in the shapes of [`Vector::convolve`].
    ///
    /// [`Vector::convolve`]: crate::cpu::vector::Vector
    pub(super) fn correlate(p: &Plane, x: &[f32], dy: &[f32], dw: &mut [f32]) = correlate_body;
}

/// A tile's place: pointers to its first input, weight and output.
#[derive(Clone, Copy)]
struct Tile {
    x: *const f32,
    w: *const f32,
    y: *mut f32,
    /// Channels that there are from the tile's first on.
    outs: usize,
    add: bool,
}

#[inline(always)]
fn convolve_body<L: Lanes>(l: L, p: &Plane, x: &[f32], w: &[f32], y: &mut [f32], add: bool) {
    if p.is_empty() {
        return;
    }
    p.check(x.len(), w.len(), y.len());
    for row in 0..p.rows {
        for at in (0..p.outs).step_by(VECTORS * L::N) {
            let mut col = 0;
            while col < p.cols {
                // SAFETY: `check` saw that every tap of every output is in the slices, and the weights
                // are padded to whole vectors.
                col += unsafe {
                    let tile = Tile {
                        x: x.as_ptr().add(p.x_at + p.step * (row * p.x_row + col)),
                        w: w.as_ptr().add(at),
                        y: y.as_mut_ptr()
                            .add(p.y_at + row * p.y_row + col * p.y_step + at),
                        outs: p.outs - at,
                        add,
                    };
                    match (p.step, p.outs - at > L::N) {
                        (1, false) => pixels::<L, 1, 1>(l, p, tile, p.cols - col),
                        (1, true) => pixels::<L, VECTORS, 1>(l, p, tile, p.cols - col),
                        (_, false) => pixels::<L, 1, 2>(l, p, tile, p.cols - col),
                        (_, true) => pixels::<L, VECTORS, 2>(l, p, tile, p.cols - col),
                    }
                };
            }
        }
    }
}

/// As many of `left` pixels as a tile takes; how many these were. Pixels are computed alike whatever the
/// tile.
///
/// # Safety
/// The taps, weights and outputs of the `left` pixels are there.
#[inline(always)]
unsafe fn pixels<L: Lanes, const V: usize, const STEP: usize>(
    l: L,
    p: &Plane,
    tile: Tile,
    left: usize,
) -> usize {
    // SAFETY: the caller's.
    unsafe {
        // Thirty-two registers, or sixteen.
        if L::PANEL >= 4 {
            if left >= 14 {
                return sums::<L, 14, V, STEP>(l, p, tile);
            } else if left >= 7 {
                return sums::<L, 7, V, STEP>(l, p, tile);
            }
        } else if left >= 6 {
            return sums::<L, 6, V, STEP>(l, p, tile);
        }
        match left {
            1 => sums::<L, 1, V, STEP>(l, p, tile),
            2 | 3 => sums::<L, 2, V, STEP>(l, p, tile),
            _ => sums::<L, 4, V, STEP>(l, p, tile),
        }
    }
}

/// Runs a body for each pixel `$r` of `$pixels`, a constant in each: an index that isn't would keep the sums
/// in memory instead of registers.
macro_rules! pixels_of_a_tile {
    (@ $pixels:expr, $r:ident $body:block $($n:literal)*) => {
        $(if $n < $pixels {
            #[allow(non_upper_case_globals)]
            const $r: usize = $n;
            $body
        })*
    };
    ($pixels:expr, $r:ident => $body:block) => {
        pixels_of_a_tile!(@ $pixels, $r $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13)
    };
}

/// `R` pixels and `V` vectors; returns `R`.
///
/// # Safety
/// As [`pixels`]'s, for `R` of them.
#[inline(always)]
unsafe fn sums<L: Lanes, const R: usize, const V: usize, const STEP: usize>(
    l: L,
    p: &Plane,
    tile: Tile,
) -> usize {
    let mut sums = [[l.splat(0.0); V]; R];
    let width = p.width();
    let mut w = tile.w;
    for tap in 0..p.taps[0] * p.taps[1] {
        // SAFETY: the caller's; the last steps lead past the ends but nothing is read there.
        unsafe {
            let mut x = tile.x.add(tap / p.taps[1] * p.x_row + tap % p.taps[1]);
            for _ in 0..p.ins {
                let mut weights = [l.splat(0.0); V];
                for (v, weight) in weights.iter_mut().enumerate() {
                    *weight = l.load(w.add(v * L::N));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let pixel = l.splat(*x.add(r * STEP));
                    for (sum, weight) in sums.iter_mut().zip(weights) {
                        *sum = l.fma(pixel, weight, *sum);
                    }
                }
                x = x.wrapping_add(p.x_plane);
                w = w.wrapping_add(width);
            }
        }
    }
    if tile.outs >= V * L::N {
        pixels_of_a_tile!(R, r => {
            for (v, &sum) in sums[r].iter().enumerate() {
                // SAFETY: the caller's; all of the tile's channels are there.
                unsafe {
                    let y = tile.y.add(r * p.y_step + v * L::N);
                    let sum = if tile.add { l.add(sum, l.load(y)) } else { sum };
                    l.store(y, sum);
                }
            }
        });
        return R;
    }
    let mut all = [[0.0; VECTORS * LANES_MAX]; PIXELS_MAX];
    pixels_of_a_tile!(R, r => {
        for (v, &sum) in sums[r].iter().enumerate() {
            l.put(&mut all[r][v * L::N..], sum);
        }
    });
    for (r, sums) in all.iter().enumerate().take(R) {
        for (channel, sum) in sums.iter().enumerate().take(tile.outs) {
            // SAFETY: the caller's.
            unsafe {
                let y = tile.y.add(r * p.y_step + channel);
                *y = if tile.add { sum + *y } else { *sum };
            }
        }
    }
    R
}

#[inline(always)]
fn correlate_body<L: Lanes>(l: L, p: &Plane, x: &[f32], dy: &[f32], dw: &mut [f32]) {
    if p.is_empty() {
        return;
    }
    p.check(x.len(), dw.len(), dy.len());
    assert_eq!(p.taps[0], p.taps[1], "a square kernel");
    for channel in 0..p.ins {
        for at in (0..p.outs).step_by(VECTORS * L::N) {
            let x = &x[p.x_at + channel * p.x_plane..];
            let dy = &dy[p.y_at + at..];
            let dw = &mut dw[channel * p.width() + at..];
            // SAFETY: `check` saw that every tap of every output is in the slices, and the weights are
            // padded to whole vectors.
            unsafe {
                match (p.taps[0], p.outs - at > L::N) {
                    (1, false) => taps::<L, 1, 1>(l, p, x, dy, p.outs - at, dw),
                    (1, true) => taps::<L, 1, VECTORS>(l, p, x, dy, p.outs - at, dw),
                    (3, false) => taps::<L, 3, 1>(l, p, x, dy, p.outs - at, dw),
                    (3, true) => taps::<L, 3, VECTORS>(l, p, x, dy, p.outs - at, dw),
                    (other, _) => unreachable!("kernels of 1 and 3, not {other}"),
                }
            }
        }
    }
}

/// All `K` times `K` taps of one input channel and `V` vectors of output channels, of which `outs` are
/// there.
///
/// # Safety
/// Every tap of every output is in `x`, every output in `dy`, every weight in `dw`.
#[inline(always)]
unsafe fn taps<L: Lanes, const K: usize, const V: usize>(
    l: L,
    p: &Plane,
    x: &[f32],
    dy: &[f32],
    outs: usize,
    dw: &mut [f32],
) {
    let mut sums = [[[l.splat(0.0); V]; K]; K];
    for row in 0..p.rows {
        // SAFETY: the caller's.
        unsafe {
            let mut x = x.as_ptr().add(row * p.step * p.x_row);
            let mut dy = dy.as_ptr().add(row * p.y_row);
            for _ in 0..p.cols {
                let mut slopes = [l.splat(0.0); V];
                for (v, slope) in slopes.iter_mut().enumerate() {
                    let count = L::N.min(outs.saturating_sub(v * L::N));
                    let from = dy.wrapping_add(v * L::N);
                    *slope = if count == L::N {
                        l.load(from)
                    } else {
                        l.take_part(std::slice::from_raw_parts(from, count), 0.0)
                    };
                }
                for (ky, sums) in sums.iter_mut().enumerate() {
                    for (kx, sums) in sums.iter_mut().enumerate() {
                        let pixel = l.splat(*x.add(ky * p.x_row + kx));
                        for (sum, slope) in sums.iter_mut().zip(slopes) {
                            *sum = l.fma(pixel, slope, *sum);
                        }
                    }
                }
                x = x.wrapping_add(p.step);
                dy = dy.wrapping_add(p.y_step);
            }
        }
    }
    let tap = p.ins * p.width();
    for (ky, sums) in sums.iter().enumerate() {
        for (kx, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let to = &mut dw[(ky * K + kx) * tap + v * L::N..][..L::N];
                let sum = l.add(l.take(to), sum);
                l.put(to, sum);
            }
        }
    }
}
