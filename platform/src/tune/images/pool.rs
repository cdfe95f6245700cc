//! Pooling: the largest of 2x2 pixels, of which two bits say where it was, and the mean of all pixels.
//!
//! Images are (height, width, channels), one after the other; of an odd height or width the last row or
//! column is left out.

use leanstream_core::act::codec::mask;

use crate::cpu::vector::Vector;
use crate::tune::lent::Lent;
use crate::tune::team::{Sheet, Team};

/// The most channels of an image that is pooled.
pub const CHANNELS_MAX: usize = 1024;

/// Images to take the largest of 2x2 pixels of. Channels are a multiple of 4, so that two bits each are
/// whole bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MaxPool {
    /// Rows of an image.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// Channels.
    pub channels: usize,
}

impl MaxPool {
    /// Floats of an image that comes in.
    #[must_use]
    pub fn in_len(&self) -> usize {
        self.height * self.width * self.channels
    }

    /// Floats of an image that goes out.
    #[must_use]
    pub fn out_len(&self) -> usize {
        (self.height / 2) * (self.width / 2) * self.channels
    }

    /// Bytes that say, for one image, where the largest were.
    #[must_use]
    pub fn place_bytes(&self) -> usize {
        self.out_len() / 4
    }

    /// Forward. Shapes: `x` (images, height, width, channels), `y` (images, half, half, channels), `places` of
    /// [`MaxPool::place_bytes`] for each image. Of equal pixels the first counts.
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn forward(&self, team: &Team, x: &[f32], y: &mut [f32], places: &mut [u8]) {
        let images = self.images(x.len(), y.len(), places.len());
        let (y, places) = (Lent::new(y), Lent::new(places));
        team.each(images, &|image, _| {
            // SAFETY: each image is one chunk's.
            let (y, places) = unsafe {
                (
                    y.part(image * self.out_len(), self.out_len()),
                    places.part(image * self.place_bytes(), self.place_bytes()),
                )
            };
            let x = &x[image * self.in_len()..];
            let mut index = [0; CHANNELS_MAX];
            let index = &mut index[..self.channels];
            let pixels = y
                .chunks_exact_mut(self.channels)
                .zip(places.chunks_exact_mut(self.channels / 4));
            for (pixel, (y, places)) in pixels.enumerate() {
                let corners = self.corners(pixel).map(|at| &x[at..at + self.channels]);
                for (channel, (y, index)) in y.iter_mut().zip(&mut *index).enumerate() {
                    (*y, *index) = (corners[0][channel], 0);
                    for (place, corner) in (1..).zip(&corners[1..]) {
                        if corner[channel] > *y {
                            (*y, *index) = (corner[channel], place);
                        }
                    }
                }
                mask::pack_places(index, places);
            }
        });
    }

    /// What [`MaxPool::forward`] chose, of another `x`. Shapes as there.
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn again(&self, team: &Team, x: &[f32], y: &mut [f32], places: &[u8]) {
        self.images(x.len(), y.len(), places.len());
        let sheet = Sheet {
            data: y,
            row: self.out_len(),
        };
        team.rows([sheet], 1, |image, [y], _| {
            let x = &x[image * self.in_len()..];
            self.each(&places[image * self.place_bytes()..], |out, from| {
                y[out] = x[from];
            });
        });
    }

    /// Backward: `dx` is `dy` where the largest were, and 0 elsewhere. Shapes as in [`MaxPool::forward`].
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn backward(&self, team: &Team, dy: &[f32], dx: &mut [f32], places: &[u8]) {
        self.images(dx.len(), dy.len(), places.len());
        let sheet = Sheet {
            data: dx,
            row: self.in_len(),
        };
        team.rows([sheet], 1, |image, [dx], _| {
            dx.fill(0.0);
            let dy = &dy[image * self.out_len()..];
            self.each(&places[image * self.place_bytes()..], |out, from| {
                dx[from] = dy[out];
            });
        });
    }

    /// Runs `f(output, input it came from)` for one image.
    fn each(&self, places: &[u8], mut f: impl FnMut(usize, usize)) {
        for pixel in 0..self.out_len() / self.channels {
            let corners = self.corners(pixel);
            for channel in 0..self.channels {
                let out = pixel * self.channels + channel;
                f(
                    out,
                    corners[usize::from(mask::place(places, out))] + channel,
                );
            }
        }
    }

    /// Where the four pixels of an output pixel begin.
    fn corners(&self, pixel: usize) -> [usize; 4] {
        let cols = self.width / 2;
        let (row, col) = (2 * (pixel / cols), 2 * (pixel % cols));
        [(0, 0), (0, 1), (1, 0), (1, 1)]
            .map(|(down, right)| ((row + down) * self.width + col + right) * self.channels)
    }

    fn images(&self, x: usize, y: usize, places: usize) -> usize {
        assert!(
            self.channels.is_multiple_of(4) && self.channels <= CHANNELS_MAX,
            "channels in fours"
        );
        let images = x / self.in_len();
        assert_eq!(x, images * self.in_len(), "whole images in");
        assert_eq!(y, images * self.out_len(), "as many images out");
        assert_eq!(places, images * self.place_bytes(), "two bits an output");
        images
    }
}

/// The mean of all pixels. Shapes: `x` (images, pixels, channels), `y` (images, channels).
///
/// # Panics
/// The lengths disagree.
pub fn average(team: &Team, v: Vector, x: &[f32], y: &mut [f32], channels: usize) {
    let images = y.len() / channels;
    assert_eq!(y.len(), images * channels, "whole outputs");
    let each = x.len() / images;
    assert!(
        x.len() == each * images && each.is_multiple_of(channels),
        "whole images"
    );
    let sheet = Sheet {
        data: y,
        row: channels,
    };
    team.rows([sheet], 1, |image, [y], _| {
        y.fill(0.0);
        for pixel in x[image * each..(image + 1) * each].chunks_exact(channels) {
            v.add_assign(y, pixel);
        }
        v.scale(y, channels as f32 / each as f32);
    });
}

/// Backward of [`average`]: every pixel has its share. Shapes: `dy` (images, channels), `dx` (images, pixels,
/// channels).
///
/// # Panics
/// The lengths disagree.
pub fn average_backward(team: &Team, dy: &[f32], dx: &mut [f32], channels: usize) {
    let images = dy.len() / channels;
    let each = dx.len() / images;
    assert!(
        dx.len() == each * images && each.is_multiple_of(channels),
        "whole images"
    );
    let share = channels as f32 / each as f32;
    let sheet = Sheet {
        data: dx,
        row: each,
    };
    team.rows([sheet], 1, |image, [dx], _| {
        let dy = &dy[image * channels..(image + 1) * channels];
        for pixel in dx.chunks_exact_mut(channels) {
            pixel
                .iter_mut()
                .zip(dy)
                .for_each(|(dx, dy)| *dx = share * dy);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::Random;
    use crate::tune::images::reference;
    use crate::tune::ops::testing::{agree, differences, every_machine, weighted, wide};

    #[test]
    fn the_largest_and_its_gradient() {
        every_machine(|team, _| {
            let mut random = Random(8);
            for (height, width, channels) in [(2, 2, 4), (4, 6, 8), (5, 7, 4), (8, 8, 20)] {
                let pool = MaxPool {
                    height,
                    width,
                    channels,
                };
                let x = random.floats(3 * pool.in_len(), 1.0);
                let dy = random.floats(3 * pool.out_len(), 1.0);
                let (mut y, mut dx) = (vec![f32::NAN; dy.len()], vec![f32::NAN; x.len()]);
                let mut places = vec![0xff; 3 * pool.place_bytes()];
                pool.forward(team, &x, &mut y, &mut places);
                let want = reference::max_pool(&pool, &wide(&x));
                assert_eq!(wide(&y), want);
                pool.backward(team, &dy, &mut dx, &places);
                let f = |x: &[f64]| weighted(&reference::max_pool(&pool, x), &dy);
                agree(&dx, &differences(&wide(&x), f), 1e-5, "dx");
                let mut again = vec![f32::NAN; dy.len()];
                pool.again(team, &x, &mut again, &places);
                assert_eq!(again, y);
            }
        });
    }

    #[test]
    fn the_mean_and_its_gradient() {
        every_machine(|team, v| {
            let mut random = Random(9);
            let (images, pixels, channels) = (3, 10, 5);
            let x = random.floats(images * pixels * channels, 1.0);
            let dy = random.floats(images * channels, 1.0);
            let (mut y, mut dx) = (vec![f32::NAN; dy.len()], vec![f32::NAN; x.len()]);
            average(team, v, &x, &mut y, channels);
            average_backward(team, &dy, &mut dx, channels);
            let f = |x: &[f64]| reference::average(x, images, channels);
            agree(&y, &f(&wide(&x)), 1e-6, "y");
            agree(
                &dx,
                &differences(&wide(&x), |x| weighted(&f(x), &dy)),
                1e-5,
                "dx",
            );
        });
    }
}
