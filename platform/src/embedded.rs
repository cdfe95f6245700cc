//! The model that is part of the program, so that a demo needs no network: `models/README.md` tells how it
//! was made.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::aside::Aside;
use crate::error::Error;
use crate::fetch::{cache_dir, hex, make_cache_dir};

/// A GGUF file among the program's constants.
#[derive(Clone, Copy)]
pub struct Embedded {
    /// What its files are called, but for the ending.
    pub name: &'static str,
    /// The file.
    pub bytes: &'static [u8],
    /// Of its bytes, in hex.
    pub sha256: &'static str,
}

/// A decoder of 3.4 million parameters with squared ReLU (`arcee`), Q8_0, that was trained with `tune` on
/// Jane Austen's novels and the World English Bible, both in the public domain.
pub const DEMO: Embedded = Embedded {
    name: "leanstream-demo",
    bytes: include_bytes!("../models/demo.gguf"),
    sha256: "9b6c6957a51bdf22fded5c3d11c5c12bbccf891c6009324c6aa6dc0deb4bd554",
};

impl Embedded {
    /// The model as a file in `dir`; it is written unless it is there already, whole.
    ///
    /// # Errors
    /// It can't be made.
    pub fn put(&self, dir: &Path) -> Result<PathBuf, Error> {
        // Another version's model has another name, and so has its pack.
        let path = dir.join(format!("{}-{}.gguf", self.name, &self.sha256[..8]));
        if !matches!(digest(&path), Ok(found) if found == self.sha256) {
            self.write(&path)
                .map_err(|error| Error::io(&path, "write it", error))?;
        }
        Ok(path)
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let (mut aside, mut file) = Aside::create(path)?;
        file.write_all(self.bytes)?;
        aside.finish(&file)
    }
}

/// Where embedded models are put: the cache folder, or where there is none that for temporary files.
///
/// # Errors
/// It can't be made.
pub fn folder() -> Result<PathBuf, Error> {
    let dir = cache_dir().unwrap_or_else(std::env::temp_dir);
    make_cache_dir(&dir)?;
    Ok(dir)
}

/// SHA-256 of a file, in hex.
fn digest(path: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hash)?;
    Ok(hex(hash))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_the_one_that_was_trained() {
        assert_eq!(hex(Sha256::new_with_prefix(DEMO.bytes)), DEMO.sha256);
        assert!(DEMO.bytes.len() <= 4_000_000, "{}", DEMO.bytes.len());
    }
}
