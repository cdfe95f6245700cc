//! The operations by their definitions, in double precision: what tests compare with.

use super::conv::Conv;
use super::pool::MaxPool;

/// Shapes: `w` (outs, kernel, kernel, ins), `x` (images, height, width, ins).
pub(super) fn conv(conv: &Conv, w: &[f64], x: &[f64]) -> Vec<f64> {
    let (k, pad) = (conv.kernel, conv.kernel / 2);
    let mut y = Vec::new();
    for x in x.chunks_exact(conv.in_len()) {
        for row in 0..conv.out_height() {
            for col in 0..conv.out_width() {
                for w in w.chunks_exact(k * k * conv.ins) {
                    let mut sum = 0.0;
                    for (tap, w) in w.chunks_exact(conv.ins).enumerate() {
                        let from = (row * conv.stride + tap / k).checked_sub(pad);
                        let across = (col * conv.stride + tap % k).checked_sub(pad);
                        let (Some(from), Some(across)) = (from, across) else {
                            continue;
                        };
                        if from < conv.height && across < conv.width {
                            let at = (from * conv.width + across) * conv.ins;
                            let x = &x[at..at + conv.ins];
                            sum += x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
                        }
                    }
                    y.push(sum);
                }
            }
        }
    }
    y
}

/// Shapes: `x` (rows, channels).
pub(super) fn batch_norm(x: &[f64], gamma: &[f64], beta: &[f64], eps: f64) -> Vec<f64> {
    let n = gamma.len();
    let rows = (x.len() / n) as f64;
    let column = |c: usize| x.iter().skip(c).step_by(n);
    let mut out = vec![0.0; x.len()];
    for c in 0..n {
        let mean = column(c).sum::<f64>() / rows;
        let variance = column(c).map(|x| (x - mean).powi(2)).sum::<f64>() / rows;
        let factor = gamma[c] / (variance + eps).sqrt();
        let to = out.iter_mut().skip(c).step_by(n);
        to.zip(column(c))
            .for_each(|(to, x)| *to = (x - mean) * factor + beta[c]);
    }
    out
}

/// Shapes: `x` (images, height, width, channels).
pub(super) fn max_pool(pool: &MaxPool, x: &[f64]) -> Vec<f64> {
    let mut y = Vec::new();
    for x in x.chunks_exact(pool.in_len()) {
        for row in 0..pool.height / 2 {
            for col in 0..pool.width / 2 {
                for c in 0..pool.channels {
                    let at =
                        |row: usize, col: usize| x[(row * pool.width + col) * pool.channels + c];
                    let all = [(0, 0), (0, 1), (1, 0), (1, 1)];
                    let all = all.map(|(down, right)| at(2 * row + down, 2 * col + right));
                    y.push(all.into_iter().fold(f64::MIN, f64::max));
                }
            }
        }
    }
    y
}

/// Shapes: `x` (images, pixels, channels); returns (images, channels).
pub(super) fn average(x: &[f64], images: usize, channels: usize) -> Vec<f64> {
    let each = x.len() / images;
    let pixels = (each / channels) as f64;
    let mut y = Vec::new();
    for x in x.chunks_exact(each) {
        y.extend((0..channels).map(|c| x.iter().skip(c).step_by(channels).sum::<f64>() / pixels));
    }
    y
}
