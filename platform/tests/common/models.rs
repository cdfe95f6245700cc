//! Published models, which tests read from a cache and never fetch.

use std::path::PathBuf;

/// Where a model lies, if it is in the cache: `$LEANSTREAM_CACHE`, else
/// `$XDG_CACHE_HOME/leanstream`, else `~/.cache/leanstream`.
pub fn model_path(name: &str) -> Option<PathBuf> {
    let dir = |key| {
        std::env::var_os(key)
            .filter(|dir| !dir.is_empty())
            .map(PathBuf::from)
    };
    let cache = dir("LEANSTREAM_CACHE")
        .or_else(|| dir("XDG_CACHE_HOME").map(|dir| dir.join("leanstream")))
        .or_else(|| dir("HOME").map(|dir| dir.join(".cache/leanstream")))?;
    Some(cache.join(name)).filter(|path| path.is_file())
}
