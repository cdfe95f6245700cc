//! Files that appear whole: they grow aside, under `NAME.tmp`, and take their name when they are on flash.
//! A crash or a full disk leaves the old file as it was.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A file on its way. Dropped before it has its name, it is removed.
#[derive(Debug)]
pub struct Aside {
    path: PathBuf,
    aside: PathBuf,
    named: bool,
}

/// Where a file grows that will be `path`.
pub fn name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

impl Aside {
    /// Begins a file that will be `path`, empty; what a crash left of it before is reused.
    ///
    /// # Errors
    /// It can't be made.
    pub fn create(path: &Path) -> io::Result<(Self, File)> {
        let aside = name(path);
        let file = File::create(&aside)?;
        Ok((Self::of(aside, path), file))
    }

    /// The file `aside` that there is already will be `path`.
    pub fn of(aside: PathBuf, path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            aside,
            named: false,
        }
    }

    /// The name that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name that it has until then.
    pub fn aside(&self) -> &Path {
        &self.aside
    }

    /// Gives the file its name, and replaces what had it. Its bytes must be on flash.
    ///
    /// # Errors
    /// The file system refuses; the old file stays.
    pub fn rename(&mut self) -> io::Result<()> {
        fs::rename(&self.aside, &self.path)?;
        self.named = true;
        Ok(())
    }

    /// Puts `file`, which is this one, on flash, and then its name.
    ///
    /// # Errors
    /// The disk fails.
    pub fn finish(&mut self, file: &File) -> io::Result<()> {
        file.sync_all()?;
        self.rename()?;
        sync_directory(&self.path)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if !self.named {
            // Nothing more can be done where even this fails: the next file of that name reuses it.
            let _ = fs::remove_file(&self.aside);
        }
    }
}

/// Puts the names in `path`'s directory on flash.
///
/// # Errors
/// The disk fails.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A folder of its own, removed when it is dropped.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("leanstream-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let names = fs::read_dir(&self.0).unwrap();
            let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_takes_its_name_when_it_is_finished() {
        let folder = Folder::new("aside-finished");
        let path = folder.0.join("a");
        fs::write(&path, "old").unwrap();
        let (mut aside, mut file) = Aside::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(aside.aside(), folder.0.join("a.tmp"));
        aside.finish(&file).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(folder.names(), ["a"]);
        // The next one that grows there is another's.
        let next = Aside::create(&path).unwrap();
        drop(aside);
        assert!(next.0.aside().exists());
    }

    #[test]
    fn a_file_that_is_given_up_leaves_nothing() {
        let folder = Folder::new("aside-given-up");
        let path = folder.0.join("a");
        fs::write(&path, "old").unwrap();
        drop(Aside::create(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(folder.names(), ["a"]);
        // Nor does one whose name is taken by a directory.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let (mut aside, file) = Aside::create(&path).unwrap();
        assert!(aside.finish(&file).is_err());
        drop(aside);
        assert_eq!(folder.names(), ["a"]);
    }
}
