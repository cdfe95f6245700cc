//! What AdamW remembers of a tensor's gradients, and how it is kept in a checkpoint.

use std::io::{self, Read, Write};

/// How moments are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Precision {
    /// Eight bytes a parameter.
    #[default]
    F32,
    /// A byte for each moment, and two scales for each [`BLOCK`] parameters.
    Bits8,
}

/// Parameters that share a scale.
pub(super) const BLOCK: usize = 256;

/// First and second moments of one tensor.
pub struct Moments(pub(super) Store);

/// Their numbers.
pub(super) enum Store {
    /// (n) each.
    F32 { m: Box<[f32]>, v: Box<[f32]> },
    /// Codes (n), scales (n / BLOCK, rounded up).
    Bits8 {
        m: Box<[i8]>,
        v: Box<[u8]>,
        m_scales: Box<[f32]>,
        v_scales: Box<[f32]>,
    },
}

impl Moments {
    /// Bytes of the moments of `n` parameters.
    #[must_use]
    pub const fn bytes(precision: Precision, n: usize) -> usize {
        match precision {
            Precision::F32 => 8 * n,
            Precision::Bits8 => 2 * n + 8 * n.div_ceil(BLOCK),
        }
    }

    /// Zeros for `n` parameters. Allocates [`Moments::bytes`].
    #[must_use]
    pub fn new(precision: Precision, n: usize) -> Self {
        let floats = |n| vec![0.0; n].into_boxed_slice();
        Self(match precision {
            Precision::F32 => Store::F32 {
                m: floats(n),
                v: floats(n),
            },
            Precision::Bits8 => Store::Bits8 {
                m: vec![0; n].into_boxed_slice(),
                v: vec![0; n].into_boxed_slice(),
                m_scales: floats(n.div_ceil(BLOCK)),
                v_scales: floats(n.div_ceil(BLOCK)),
            },
        })
    }

    /// How they are stored.
    #[must_use]
    pub fn precision(&self) -> Precision {
        match self.0 {
            Store::F32 { .. } => Precision::F32,
            Store::Bits8 { .. } => Precision::Bits8,
        }
    }

    /// Parameters.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Store::F32 { m, .. } => m.len(),
            Store::Bits8 { m, .. } => m.len(),
        }
    }

    /// Whether there are no parameters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes [`Moments::bytes`] bytes, from which [`Moments::read`] makes the same moments again.
    ///
    /// # Errors
    /// What the writer says.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match &self.0 {
            Store::F32 { m, v } => {
                write_floats(to, m)?;
                write_floats(to, v)
            }
            Store::Bits8 {
                m,
                v,
                m_scales,
                v_scales,
            } => {
                let mut bytes = [0; 1024];
                for codes in m.chunks(bytes.len()) {
                    for (byte, code) in bytes.iter_mut().zip(codes) {
                        *byte = code.cast_unsigned();
                    }
                    to.write_all(&bytes[..codes.len()])?;
                }
                to.write_all(v)?;
                write_floats(to, m_scales)?;
                write_floats(to, v_scales)
            }
        }
    }

    /// Reads what [`Moments::write`] wrote of as many parameters at the same precision.
    ///
    /// # Errors
    /// What the reader says, or `InvalidData` where a number isn't finite or a second moment is negative:
    /// the moments are then of no use.
    pub fn read(&mut self, from: &mut impl Read) -> io::Result<()> {
        match &mut self.0 {
            Store::F32 { m, v } => {
                read_floats(from, m, f32::NEG_INFINITY)?;
                read_floats(from, v, 0.0)
            }
            Store::Bits8 {
                m,
                v,
                m_scales,
                v_scales,
            } => {
                let mut bytes = [0u8; 1024];
                for codes in m.chunks_mut(bytes.len()) {
                    let bytes = &mut bytes[..codes.len()];
                    from.read_exact(bytes)?;
                    for (byte, code) in bytes.iter().zip(codes) {
                        *code = byte.cast_signed();
                    }
                }
                from.read_exact(v)?;
                read_floats(from, m_scales, 0.0)?;
                read_floats(from, v_scales, 0.0)
            }
        }
    }
}

fn write_floats(to: &mut impl Write, x: &[f32]) -> io::Result<()> {
    let mut bytes = [0; 1024];
    for x in x.chunks(bytes.len() / 4) {
        for (bytes, x) in bytes.chunks_exact_mut(4).zip(x) {
            bytes.copy_from_slice(&x.to_le_bytes());
        }
        to.write_all(&bytes[..4 * x.len()])?;
    }
    Ok(())
}

fn read_floats(from: &mut impl Read, x: &mut [f32], least: f32) -> io::Result<()> {
    let mut bytes = [0; 1024];
    for x in x.chunks_mut(bytes.len() / 4) {
        let bytes = &mut bytes[..4 * x.len()];
        from.read_exact(bytes)?;
        for (bytes, x) in bytes.as_chunks::<4>().0.iter().zip(x) {
            *x = f32::from_le_bytes(*bytes);
            if !x.is_finite() || *x < least {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the optimizer's moments are damaged: a number that none of them can be",
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::adamw::{AdamW, Update};
    use super::*;
    use crate::cpu::vector::Vector;
    use crate::cpu::vector::testing::Random;
    use crate::tune::team::Team;

    const N: usize = 1111;

    /// Moments after two steps, and their bytes.
    fn some(precision: Precision) -> (Moments, Vec<u8>) {
        let team = Team::new(1).unwrap();
        let mut random = Random(41);
        let (mut w, mut moments) = (random.floats(N, 1.0), Moments::new(precision, N));
        for step in 0..2 {
            let update = Update {
                step,
                ..Update::default()
            };
            let g = random.floats(N, 1.0);
            AdamW::default().step(&team, Vector::detect(), &mut w, &g, &mut moments, &update);
        }
        let mut bytes = Vec::new();
        moments.write(&mut bytes).unwrap();
        (moments, bytes)
    }

    #[test]
    fn a_checkpoint_gives_the_same_moments() {
        for precision in [Precision::F32, Precision::Bits8] {
            let (moments, bytes) = some(precision);
            assert_eq!(bytes.len(), Moments::bytes(precision, N));
            assert_eq!((moments.len(), moments.precision()), (N, precision));
            let mut again = Moments::new(precision, N);
            again.read(&mut &bytes[..]).unwrap();
            let mut copy = Vec::new();
            again.write(&mut copy).unwrap();
            assert_eq!(copy, bytes);
            assert!(bytes.iter().filter(|byte| **byte != 0).count() > bytes.len() / 2);
        }
    }

    #[test]
    fn damage_and_short_files_are_errors() {
        for precision in [Precision::F32, Precision::Bits8] {
            let (_, mut bytes) = some(precision);
            let mut moments = Moments::new(precision, N);
            let short = moments.read(&mut &bytes[..bytes.len() - 1]);
            assert_eq!(short.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            let last = bytes.len() - 4;
            for bad in [f32::NAN, f32::INFINITY, -1.0] {
                bytes[last..].copy_from_slice(&bad.to_le_bytes());
                let error = moments.read(&mut &bytes[..]).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            }
        }
    }
}
