//! Convolutions of 3x3 and 1x1 with strides 1 and 2, padded so that a stride of 1 keeps the size.
//!
//! Images are (height, width, channels), one after the other. One image is computed by one thread, from a
//! copy of it in planes with a border of zeros. The gradient of the input is a convolution too: one for
//! each remainder of the pixel's place by the stride, with the taps that reach it. The gradient of the
//! weights is summed over the images of a part, then over parts, whose number doesn't depend on the
//! threads.

mod pack;
mod plane;
#[cfg(test)]
mod tests;

use crate::cpu::vector::Vector;
use crate::tune::lent::Lent;
use crate::tune::team::Team;
use plane::Plane;

/// Parts of a batch whose gradients of the weights are summed apart.
const PARTS: usize = 16;

/// A convolution's shape. Weights are (outs, kernel, kernel, ins).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conv {
    /// Rows of the input.
    pub height: usize,
    /// Columns of the input.
    pub width: usize,
    /// Channels of the input.
    pub ins: usize,
    /// Channels of the output.
    pub outs: usize,
    /// Rows and columns of the kernel: 1 or 3.
    pub kernel: usize,
    /// 1 or 2: 2 takes every other row and column.
    pub stride: usize,
}

impl Conv {
    /// Rows of the output.
    #[must_use]
    pub fn out_height(&self) -> usize {
        self.height.div_ceil(self.stride)
    }

    /// Columns of the output.
    #[must_use]
    pub fn out_width(&self) -> usize {
        self.width.div_ceil(self.stride)
    }

    /// Floats of an image that comes in.
    #[must_use]
    pub fn in_len(&self) -> usize {
        self.height * self.width * self.ins
    }

    /// Floats of an image that goes out.
    #[must_use]
    pub fn out_len(&self) -> usize {
        self.out_height() * self.out_width() * self.outs
    }

    /// Weights.
    #[must_use]
    pub fn weights(&self) -> usize {
        self.outs * self.kernel * self.kernel * self.ins
    }

    /// Rows of zeros around the input.
    fn pad(&self) -> usize {
        self.kernel / 2
    }

    /// The input in planes.
    fn in_planes(&self) -> Planes {
        let pad = self.pad();
        Planes {
            width: self.width,
            channels: self.ins,
            before: pad,
            rows: self.height + 2 * pad,
            cols: self.width + 2 * pad,
        }
    }

    /// The output's gradient in planes.
    fn out_planes(&self) -> Planes {
        let pad = self.pad();
        Planes {
            width: self.out_width(),
            channels: self.outs,
            before: pad,
            rows: self.out_height() + 2 * pad,
            cols: self.out_width() + 2 * pad,
        }
    }

    fn plane(&self) -> Plane {
        let planes = self.in_planes();
        Plane {
            rows: self.out_height(),
            cols: self.out_width(),
            ins: self.ins,
            outs: self.outs,
            taps: [self.kernel; 2],
            step: self.stride,
            x_at: 0,
            x_row: planes.cols,
            x_plane: planes.rows * planes.cols,
            y_at: 0,
            y_step: self.outs,
            y_row: self.out_width() * self.outs,
        }
    }

    /// How the gradients of those input pixels whose rows and columns are `phase` beyond a multiple of the
    /// stride follow from the output's.
    fn phase(&self, phase: [usize; 2]) -> Plane {
        let planes = self.out_planes();
        let [rows, cols] = phase.map(|phase| Taps::of(self, phase));
        let count = |len: usize, phase: usize| len.saturating_sub(phase).div_ceil(self.stride);
        Plane {
            rows: count(self.height, phase[0]),
            cols: count(self.width, phase[1]),
            ins: self.outs,
            outs: self.ins,
            taps: [rows.count, cols.count],
            step: 1,
            x_at: rows.first * planes.cols + cols.first,
            x_row: planes.cols,
            x_plane: planes.rows * planes.cols,
            y_at: (phase[0] * self.width + phase[1]) * self.ins,
            y_step: self.stride * self.ins,
            y_row: self.stride * self.width * self.ins,
        }
    }

    /// Every phase in turn.
    fn phases(&self) -> impl Iterator<Item = [usize; 2]> {
        let stride = self.stride;
        (0..stride * stride).map(move |i| [i / stride, i % stride])
    }

    fn check(&self) {
        assert!(
            matches!(self.kernel, 1 | 3) && matches!(self.stride, 1 | 2),
            "kernels of 1 and 3, strides of 1 and 2"
        );
    }
}

/// The taps, in one direction, that reach the inputs of one phase.
#[derive(Clone, Copy, Debug)]
struct Taps {
    /// How many.
    count: usize,
    /// The last of them, which reaches the first output; the others are a stride apart.
    last: usize,
    /// Where, in the output's padded planes, the first input's first output lies.
    first: usize,
}

impl Taps {
    /// Output `o` reaches input `stride * o + tap - pad`.
    fn of(conv: &Conv, phase: usize) -> Self {
        let (stride, pad) = (conv.stride, conv.pad());
        let least = (phase + pad) % stride;
        if least >= conv.kernel {
            return Self {
                count: 0,
                last: 0,
                first: 0,
            };
        }
        let count = (conv.kernel - least).div_ceil(stride);
        let last = least + (count - 1) * stride;
        // The output at which the last tap reaches the phase's first input, counted from the border.
        let first = (phase + pad + pad * stride - last) / stride;
        Self { count, last, first }
    }
}

/// One image in planes with a border.
#[derive(Clone, Copy, Debug)]
struct Planes {
    width: usize,
    channels: usize,
    /// Rows and columns of zeros before the first.
    before: usize,
    /// Rows of a plane, with the border.
    rows: usize,
    /// Columns of a plane, with the border.
    cols: usize,
}

impl Planes {
    fn len(&self) -> usize {
        self.channels * self.rows * self.cols
    }

    /// Writes the image that `x` begins with into planes. Shapes: `x` (height, width, channels), `out`
    /// (channels, rows, cols).
    fn fill(&self, x: &[f32], out: &mut [f32]) {
        let out = &mut out[..self.len()];
        out.fill(0.0);
        for (channel, plane) in out.chunks_exact_mut(self.rows * self.cols).enumerate() {
            let rows = x.chunks_exact(self.width * self.channels);
            let height = self.rows - 2 * self.before;
            let lines = plane.chunks_exact_mut(self.cols);
            let lines = lines.skip(self.before).take(height);
            for (row, line) in rows.zip(lines) {
                let line = &mut line[self.before..self.before + self.width];
                let pixels = row[channel..].iter().step_by(self.channels);
                line.iter_mut().zip(pixels).for_each(|(to, x)| *to = *x);
            }
        }
    }
}

/// What convolutions compute in, made once.
#[derive(Debug)]
pub struct Work {
    /// Weights as a kernel reads them.
    packed: Vec<f32>,
    /// An image for each thread.
    planes: Vec<f32>,
    /// Gradients of the weights for each part.
    parts: Vec<f32>,
    threads: usize,
}

impl Work {
    /// For any of `convs`, on up to `threads` threads. The only place that allocates.
    #[must_use]
    pub fn new(convs: &[Conv], threads: usize) -> Self {
        let [packed, planes, parts] = Self::floats(convs, threads).map(|len| vec![0.0; len]);
        Self {
            packed,
            planes,
            parts,
            threads,
        }
    }

    /// Bytes of [`Work::new`].
    #[must_use]
    pub fn bytes(convs: &[Conv], threads: usize) -> usize {
        Self::floats(convs, threads).iter().sum::<usize>() * size_of::<f32>()
    }

    fn floats(convs: &[Conv], threads: usize) -> [usize; 3] {
        let most = |f: fn(&Conv) -> usize| convs.iter().map(f).max().unwrap_or(0);
        let forward = most(|conv| conv.plane().weights());
        let backward = most(|conv| conv.phases().map(|phase| conv.phase(phase).weights()).sum());
        let planes = most(|conv| conv.in_planes().len().max(conv.out_planes().len()));
        [forward.max(backward), threads * planes, PARTS * forward]
    }
}

/// Forward: `y (+)= x` convolved with `w`.
///
/// Shapes: `x` (images, height, width, ins), `w` (outs, kernel, kernel, ins), `y` (images, out height, out
/// width, outs).
///
/// # Panics
/// The lengths disagree, or `work` wasn't made for this convolution and team.
#[expect(
    clippy::too_many_arguments,
    reason = "operands and where they are computed"
)]
pub fn forward(
    team: &Team,
    v: Vector,
    work: &mut Work,
    conv: &Conv,
    w: &[f32],
    x: &[f32],
    y: &mut [f32],
    add: bool,
) {
    let images = images(conv, x.len(), y.len());
    let plane = conv.plane();
    let packed = &mut work.packed[..plane.weights()];
    pack::forward(conv, w, packed);
    let packed = &*packed;
    let each = work.planes.len() / work.threads;
    assert!(team.threads() <= work.threads, "planes for every thread");
    let (planes, y) = (Lent::new(&mut work.planes), Lent::new(y));
    team.each(images, &|image, thread| {
        // SAFETY: each thread has its own planes, each image is one chunk's.
        let (planes, y) = unsafe {
            (
                planes.part(thread * each, each),
                y.part(image * conv.out_len(), conv.out_len()),
            )
        };
        conv.in_planes().fill(&x[image * conv.in_len()..], planes);
        v.convolve(&plane, planes, packed, y, add);
    });
}

/// The gradient of the input: `dx (+)= ` what each pixel of `dy` owes it. Shapes as in [`forward`].
///
/// # Panics
/// As [`forward`].
#[expect(
    clippy::too_many_arguments,
    reason = "operands and where they are computed"
)]
pub fn input_gradient(
    team: &Team,
    v: Vector,
    work: &mut Work,
    conv: &Conv,
    w: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    add: bool,
) {
    let images = images(conv, dx.len(), dy.len());
    let mut rest = &mut work.packed[..];
    for phase in conv.phases() {
        let packed;
        (packed, rest) = rest.split_at_mut(conv.phase(phase).weights());
        pack::backward(conv, phase, w, packed);
    }
    let packed = &*work.packed;
    let each = work.planes.len() / work.threads;
    assert!(team.threads() <= work.threads, "planes for every thread");
    let (planes, dx) = (Lent::new(&mut work.planes), Lent::new(dx));
    team.each(images, &|image, thread| {
        // SAFETY: each thread has its own planes, each image is one chunk's.
        let (planes, dx) = unsafe {
            (
                planes.part(thread * each, each),
                dx.part(image * conv.in_len(), conv.in_len()),
            )
        };
        conv.out_planes()
            .fill(&dy[image * conv.out_len()..], planes);
        let mut rest = packed;
        let plane = |phase| conv.phase(phase);
        if !add && conv.phases().any(|phase| plane(phase).weights() == 0) {
            // What no tap reaches has no gradient.
            dx.fill(0.0);
        }
        for phase in conv.phases() {
            let plane = plane(phase);
            let weights;
            (weights, rest) = rest.split_at(plane.weights());
            v.convolve(&plane, planes, weights, dx, add);
        }
    });
}

/// Adds the gradient of the weights. Shapes: `dw` (outs, kernel, kernel, ins), the others as in
/// [`forward`].
///
/// # Panics
/// As [`forward`].
pub fn weight_gradient(
    team: &Team,
    v: Vector,
    work: &mut Work,
    conv: &Conv,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
) {
    let images = images(conv, x.len(), dy.len());
    let plane = conv.plane();
    let (len, each) = (plane.weights(), work.planes.len() / work.threads);
    assert!(team.threads() <= work.threads, "planes for every thread");
    let per = images.div_ceil(PARTS);
    let count = images.div_ceil(per.max(1));
    let (planes, parts) = (Lent::new(&mut work.planes), Lent::new(&mut work.parts));
    team.each(count, &|part, thread| {
        // SAFETY: each thread has its own planes, each part its own sums.
        let (planes, sums) = unsafe {
            (
                planes.part(thread * each, each),
                parts.part(part * len, len),
            )
        };
        sums.fill(0.0);
        for image in part * per..images.min((part + 1) * per) {
            conv.in_planes().fill(&x[image * conv.in_len()..], planes);
            v.correlate(&plane, planes, &dy[image * conv.out_len()..], sums);
        }
    });
    let (first, rest) = work.parts[..count * len].split_at_mut(len.min(count * len));
    for part in rest.chunks_exact(len) {
        v.add_assign(first, part);
    }
    if count > 0 {
        pack::add_gradient(conv, first, dw);
    }
}

/// How many images there are.
fn images(conv: &Conv, x: usize, y: usize) -> usize {
    conv.check();
    let images = x / conv.in_len();
    assert_eq!(x, images * conv.in_len(), "whole images in");
    assert_eq!(y, images * conv.out_len(), "as many images out");
    images
}
