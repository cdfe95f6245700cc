//! Images with labels: in memory as bytes, and read from the formats in which small sets are published.

use std::fmt;

use crate::tune::data::order;

/// The most classes, so that a label is a byte.
const CLASSES_MAX: usize = 256;

/// A set of images of one shape. Pixels are scaled as they are handed out.
#[derive(Clone, Debug)]
pub struct Images {
    /// Height, width and channels.
    pub shape: [usize; 3],
    /// How many classes there are: the highest label and one.
    pub classes: usize,
    /// (images, height, width, channels)
    pixels: Vec<u8>,
    labels: Vec<u8>,
    /// What a pixel is multiplied with, and what is added then.
    scale: [f32; 2],
}

/// What is wrong with a set of images.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DataError {
    /// It begins otherwise than an IDX file of bytes with so many dimensions.
    NotIdx {
        /// Dimensions that were wanted.
        dimensions: u8,
    },
    /// Its header promises another number of bytes.
    Length {
        /// Bytes that the header promises.
        wanted: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// Other numbers of images and labels.
    Count {
        /// Images.
        images: usize,
        /// Labels.
        labels: usize,
    },
    /// No images.
    Empty,
    /// A line of a table isn't as many numbers from 0 to 255 as the first.
    Line {
        /// Counted from 1.
        line: usize,
        /// Numbers that were wanted, the label counted.
        wanted: usize,
    },
    /// A table's lines aren't pixels of a square and a label.
    Square {
        /// Numbers of a line.
        numbers: usize,
    },
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotIdx { dimensions } => write!(
                f,
                "not an IDX file of bytes in {dimensions} dimensions (packed files must be unpacked first)"
            ),
            Self::Length { wanted, found } => {
                write!(
                    f,
                    "has {found} bytes where its header promises {wanted}; fetch it again"
                )
            }
            Self::Count { images, labels } => {
                write!(
                    f,
                    "{images} images with {labels} labels: files of different sets"
                )
            }
            Self::Empty => f.write_str("has no images"),
            Self::Line { line, wanted } => {
                write!(f, "line {line}: isn't {wanted} whole numbers from 0 to 255")
            }
            Self::Square { numbers } => write!(
                f,
                "its lines have {numbers} numbers, which aren't the pixels of a square image and a label"
            ),
        }
    }
}

impl std::error::Error for DataError {}

impl Images {
    /// Of raw parts. Shapes: `pixels` (images, height, width, channels), `labels` (images).
    ///
    /// # Errors
    /// No images, or other numbers of pixels and labels.
    pub fn new(shape: [usize; 3], pixels: Vec<u8>, labels: Vec<u8>) -> Result<Self, DataError> {
        let each: usize = shape.iter().product();
        let images = pixels.len().checked_div(each).unwrap_or(0);
        if images == 0 || labels.is_empty() {
            return Err(DataError::Empty);
        }
        if images != labels.len() || images * each != pixels.len() {
            return Err(DataError::Count {
                images,
                labels: labels.len(),
            });
        }
        let classes = labels.iter().copied().max().map_or(0, usize::from) + 1;
        debug_assert!(classes <= CLASSES_MAX);
        let mut set = Self {
            shape,
            classes,
            pixels,
            labels,
            scale: [1.0, 0.0],
        };
        set.scale = set.own_scale();
        Ok(set)
    }

    /// Of two files as MNIST has them: the images' (number, height, width) and the labels'.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn idx(images: &[u8], labels: &[u8]) -> Result<Self, DataError> {
        let ([_, height, width], pixels) = idx(images)?;
        let ([_], labels) = idx(labels)?;
        Self::new([height, width, 1], pixels.to_vec(), labels.to_vec())
    }

    /// Of a table: a line for each image, its pixels and then its label, whole numbers with commas.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn table(text: &str) -> Result<Self, DataError> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        let mut wanted = 0;
        for (index, line) in text.lines().enumerate() {
            let bad = |wanted| DataError::Line {
                line: index + 1,
                wanted,
            };
            let before = pixels.len();
            for number in line.split(',') {
                pixels.push(number.trim().parse::<u8>().map_err(|_| bad(wanted))?);
            }
            let count = pixels.len() - before;
            if index == 0 {
                wanted = count;
            }
            if count != wanted {
                return Err(bad(wanted));
            }
            labels.extend(pixels.pop());
        }
        if labels.is_empty() {
            return Err(DataError::Empty);
        }
        let side = (wanted - 1).isqrt();
        if side == 0 || side * side != wanted - 1 {
            return Err(DataError::Square { numbers: wanted });
        }
        Self::new([side, side, 1], pixels, labels)
    }

    /// How many images.
    #[must_use]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none; there always are some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Floats of an image.
    #[must_use]
    pub fn image_len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.pixels.len() + self.labels.len()
    }

    /// The first `count` images, and the others.
    ///
    /// # Errors
    /// One of both has none.
    pub fn split(self, count: usize) -> Result<[Self; 2], DataError> {
        let each = self.image_len();
        let count = count.min(self.len());
        let part = |range: std::ops::Range<usize>| {
            let pixels = self.pixels[range.start * each..range.end * each].to_vec();
            Self::new(self.shape, pixels, self.labels[range].to_vec())
        };
        let mut parts = [part(0..count)?, part(count..self.len())?];
        parts.iter_mut().for_each(|set| set.classes = self.classes);
        Ok(parts)
    }

    /// Scales pixels as `other` does: test images as those that were trained on.
    pub fn scale_as(&mut self, other: &Self) {
        self.scale = other.scale;
    }

    /// The number of the image at `index` of an epoch's own order.
    #[must_use]
    pub fn shuffled(&self, seed: u64, epoch: u64, index: u64) -> usize {
        order::place(seed, epoch, index, self.len() as u64) as usize
    }

    /// Writes images by number. Shapes: `out` (numbers, height, width, channels), `labels` (numbers).
    ///
    /// # Panics
    /// There is no such image, or the lengths disagree.
    pub fn fill(&self, numbers: impl Iterator<Item = usize>, out: &mut [f32], labels: &mut [u32]) {
        let each = self.image_len();
        assert_eq!(
            out.len(),
            labels.len() * each,
            "room for as many images as labels"
        );
        let [factor, term] = self.scale;
        let mut places = out.chunks_exact_mut(each).zip(labels);
        for number in numbers {
            let (out, label) = places.next().expect("room for every image");
            *label = u32::from(self.labels[number]);
            let pixels = &self.pixels[number * each..(number + 1) * each];
            for (out, pixel) in out.iter_mut().zip(pixels) {
                *out = f32::from(*pixel) * factor + term;
            }
        }
        assert!(places.next().is_none(), "an image for every place");
    }

    /// What makes the mean of all pixels 0 and their variance 1.
    fn own_scale(&self) -> [f32; 2] {
        let mut counts = [0u64; 256];
        self.pixels
            .iter()
            .for_each(|p| counts[usize::from(*p)] += 1);
        let moment = |f: &dyn Fn(f64) -> f64| {
            let terms = counts.iter().enumerate();
            let sum: f64 = terms.map(|(p, count)| f(p as f64) * *count as f64).sum();
            sum / self.pixels.len() as f64
        };
        let mean = moment(&|p| p);
        let deviation = moment(&|p| (p - mean).powi(2)).sqrt().max(1e-3);
        [(1.0 / deviation) as f32, (-mean / deviation) as f32]
    }
}

/// The dimensions and the bytes of an IDX file.
fn idx<const D: usize>(file: &[u8]) -> Result<([usize; D], &[u8]), DataError> {
    const BYTES: u8 = 8;
    let bad = DataError::NotIdx {
        dimensions: D as u8,
    };
    let (head, rest) = file.split_at_checked(4).ok_or(bad.clone())?;
    if head != [0, 0, BYTES, D as u8] {
        return Err(bad);
    }
    let (sizes, rest) = rest.split_at_checked(4 * D).ok_or(bad)?;
    let mut dimensions = [0; D];
    for (to, size) in dimensions.iter_mut().zip(sizes.chunks_exact(4)) {
        *to = u32::from_be_bytes(size.try_into().expect("four bytes")) as usize;
    }
    let wanted = dimensions
        .iter()
        .try_fold(1u64, |product, size| product.checked_mul(*size as u64))
        .unwrap_or(u64::MAX);
    if wanted != rest.len() as u64 {
        return Err(DataError::Length {
            wanted,
            found: rest.len() as u64,
        });
    }
    Ok((dimensions, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dimensions: &[u32], bytes: &[u8]) -> Vec<u8> {
        let mut file = vec![0, 0, 8, dimensions.len() as u8];
        dimensions
            .iter()
            .for_each(|size| file.extend(size.to_be_bytes()));
        file.extend(bytes);
        file
    }

    #[test]
    fn idx_files() {
        let images = file(&[2, 2, 3], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        let labels = file(&[2], &[1, 0]);
        let set = Images::idx(&images, &labels).unwrap();
        assert_eq!((set.shape, set.classes, set.len()), ([2, 3, 1], 2, 2));
        let (mut out, mut found) = ([0.0; 12], [9; 2]);
        set.fill([1, 0].into_iter(), &mut out, &mut found);
        assert_eq!(found, [0, 1]);
        let mean = out.iter().sum::<f32>() / 12.0;
        let square = out.iter().map(|x| x * x).sum::<f32>() / 12.0;
        assert!(mean.abs() < 1e-6 && (square - 1.0).abs() < 1e-5);
        assert!(out[0] > out[11]);
        let mut seen: Vec<_> = (0..2).map(|i| set.shuffled(1, 0, i)).collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1]);
    }

    #[test]
    fn damaged_files_are_named() {
        let images = file(&[2, 2, 3], &[0; 12]);
        let labels = file(&[2], &[1, 0]);
        let error = |images: &[u8], labels: &[u8]| Images::idx(images, labels).unwrap_err();
        for cut in [0, 3, 7, 15] {
            let error = error(&images[..cut], &labels);
            assert_eq!(error, DataError::NotIdx { dimensions: 3 }, "{cut}");
        }
        assert_eq!(error(&labels, &labels), DataError::NotIdx { dimensions: 3 });
        let (wanted, found) = (12, 11);
        assert_eq!(
            error(&images[..27], &labels),
            DataError::Length { wanted, found }
        );
        let huge = file(&[u32::MAX, u32::MAX, u32::MAX], &[]);
        let (wanted, found) = (u64::MAX, 0);
        assert_eq!(error(&huge, &labels), DataError::Length { wanted, found });
        let three = file(&[3], &[1, 0, 2]);
        let (images_found, labels_found) = (2, 3);
        assert_eq!(
            error(&images, &three),
            DataError::Count {
                images: images_found,
                labels: labels_found
            }
        );
        assert_eq!(error(&file(&[0, 2, 3], &[]), &labels), DataError::Empty);
        assert_eq!(error(&file(&[2, 0, 3], &[]), &labels), DataError::Empty);
    }

    #[test]
    fn tables() {
        let set = Images::table("0, 1,2,3,7\n4,5,6,16,0\n").unwrap();
        assert_eq!((set.shape, set.classes, set.len()), ([2, 2, 1], 8, 2));
        let [first, second] = set.split(1).unwrap();
        assert_eq!((first.labels[0], second.labels[0]), (7, 0));
        assert_eq!(second.classes, 8);
        let error = |text: &str| Images::table(text).unwrap_err();
        assert_eq!(error(""), DataError::Empty);
        assert_eq!(error("1,2,3"), DataError::Square { numbers: 3 });
        assert_eq!(error("7"), DataError::Square { numbers: 1 });
        let line = |line| DataError::Line { line, wanted: 5 };
        assert_eq!(error("0,1,2,3,7\n1,2,3,4\n"), line(2));
        assert_eq!(error("0,1,2,3,7\n1,2,3,4,256\n"), line(2));
        assert_eq!(error("0,1,2,3,7\n\n"), line(2));
    }
}
