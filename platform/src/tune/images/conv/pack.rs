//! Weights in the order in which the kernels read them.

use super::{Conv, Taps};
use crate::cpu::vector::lanes::LANES_MAX;

/// (outs, kernel, kernel, ins) to (kernel, kernel, ins, outs and padding).
pub(super) fn forward(conv: &Conv, w: &[f32], out: &mut [f32]) {
    let taps = conv.kernel * conv.kernel;
    let width = conv.outs.next_multiple_of(LANES_MAX);
    assert_eq!(w.len(), conv.weights(), "weights of the convolution");
    out.fill(0.0);
    for (channel, w) in w.chunks_exact(taps * conv.ins).enumerate() {
        let column = out[channel..].iter_mut().step_by(width);
        column.zip(w).for_each(|(to, w)| *to = *w);
    }
}

/// The taps that reach a phase of the input, last first: (rows, columns, outs, ins and padding).
pub(super) fn backward(conv: &Conv, phase: [usize; 2], w: &[f32], out: &mut [f32]) {
    let [rows, cols] = phase.map(|phase| Taps::of(conv, phase));
    let width = conv.ins.next_multiple_of(LANES_MAX);
    assert_eq!(w.len(), conv.weights(), "weights of the convolution");
    out.fill(0.0);
    let mut lines = out.chunks_exact_mut(width);
    for row in 0..rows.count {
        for col in 0..cols.count {
            let tap = (rows.last - row * conv.stride) * conv.kernel + cols.last - col * conv.stride;
            for channel in 0..conv.outs {
                let from = (channel * conv.kernel * conv.kernel + tap) * conv.ins;
                let line = lines.next().expect("a line for each tap and channel");
                line[..conv.ins].copy_from_slice(&w[from..from + conv.ins]);
            }
        }
    }
}

/// Adds (kernel, kernel, ins, outs and padding) to (outs, kernel, kernel, ins).
pub(super) fn add_gradient(conv: &Conv, sums: &[f32], dw: &mut [f32]) {
    let taps = conv.kernel * conv.kernel;
    let width = conv.outs.next_multiple_of(LANES_MAX);
    assert_eq!(dw.len(), conv.weights(), "weights of the convolution");
    for (channel, dw) in dw.chunks_exact_mut(taps * conv.ins).enumerate() {
        let column = sums[channel..].iter().step_by(width);
        dw.iter_mut().zip(column).for_each(|(to, sum)| *to += sum);
    }
}
