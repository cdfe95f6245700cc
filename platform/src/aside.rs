//! Files that appear whole: they grow aside, under `NAME.tmp`, and take their name when they are on flash.
//! A crash or a full disk leaves the old file as it was.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
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
    /// Begins a file that will be `path`, empty, for this process alone as long as the file is open; what a crash
    /// left of it before is reused.
    ///
    /// # Errors
    /// It can't be made, another process makes it, or a directory, a device or a pipe has its name.
    pub fn create(path: &Path) -> io::Result<(Self, File)> {
        if path.file_name().is_none() {
            return Err(io::Error::other("it is no file's name"));
        }
        let aside = name(path);
        for path in [path, &aside] {
            if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
                return Err(io::Error::other(format!(
                    "{} is there and is no file",
                    path.display()
                )));
            }
        }
        let file = open_locked(&aside)?;
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

/// Opens and empties `path` for this process alone.
fn open_locked(path: &Path) -> io::Result<File> {
    loop {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(
                    io::ErrorKind::WouldBlock,
                    "another process is writing it: wait for it to end",
                ));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Between open and lock another writer may have finished: then the lock is on a file that
        // has its final name, which must not be emptied.
        let ours = file.metadata()?;
        match fs::metadata(path) {
            Ok(named) if (named.dev(), named.ino()) == (ours.dev(), ours.ino()) => {
                file.set_len(0)?;
                return Ok(file);
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
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
        // Nor does one whose name was taken by a directory meanwhile.
        let (mut aside, file) = Aside::create(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(aside.finish(&file).is_err());
        drop(aside);
        assert_eq!(folder.names(), ["a"]);
    }

    #[test]
    fn only_files_are_replaced() {
        let folder = Folder::new("aside-replaced");
        let path = folder.0.join("a");
        fs::create_dir(&path).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(folder.0.join("b.tmp")).unwrap();
        for path in [
            path,
            folder.0.join("b"),
            PathBuf::new(),
            folder.0.join(".."),
        ] {
            assert!(Aside::create(&path).is_err(), "{}", path.display());
        }
        let mut names = folder.names();
        names.sort();
        assert_eq!(names, ["a", "b.tmp"]);
    }

    #[test]
    fn one_writes_at_a_time() {
        let folder = Folder::new("aside-alone");
        let path = folder.0.join("a");
        let (aside, file) = Aside::create(&path).unwrap();
        let refused = Aside::create(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        drop((aside, file));
        Aside::create(&path).unwrap();
    }
}
