//! What the integration tests share: models made on the spot, a slow forward pass in doubles, and
//! logits that llama.cpp computed for the same models.

#![allow(dead_code, reason = "every test program uses its own part")]

pub mod adapters;
pub mod cases;
pub mod cli;
pub mod golden;
pub mod inputs;
pub mod models;
pub mod packs;
pub mod reference;
pub mod run;
pub mod tune;

use std::path::{Path, PathBuf};

/// A directory of its own for one test, removed with what is in it.
pub struct Scratch(PathBuf);

impl Scratch {
    /// `name` must be unlike that of any test that runs in the same process.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("leanstream-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for temporary files");
        Self(path)
    }

    /// A path in it.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }

    /// The names of the files in it, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("the directory");
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How far `got` is from `want`: the norm of the difference over the norm of `want`.
pub fn relative_l2(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let off: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    let size: f64 = want.iter().map(|w| w.powi(2)).sum();
    (off / size).sqrt()
}
