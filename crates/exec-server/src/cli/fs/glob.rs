//! Patterns in paths of a server, which no shell on this machine can expand.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};
use globset::GlobBuilder;

use super::FilesLocation;

/// Paths that a pattern selects, in order of their names; the path itself if it is no pattern or
/// exists.
pub(super) async fn expand(location: &FilesLocation, path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let exists = async |path: &Path| match location.uri(path).await {
        Ok(path) => location
            .files
            .metadata(&path, Default::default())
            .await
            .is_ok(),
        Err(_) => false,
    };
    if location.is_local || !is_pattern(path.as_os_str()) || exists(path).await {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = vec![PathBuf::new()];
    let mut is_after_pattern = false;
    for component in path.components() {
        let name = component.as_os_str();
        if !is_pattern(name) || !matches!(component, Component::Normal(_)) {
            for path in &mut found {
                path.push(name);
            }
            if is_after_pattern {
                let mut existing = Vec::new();
                for path in found {
                    if exists(&path).await {
                        existing.push(path);
                    }
                }
                found = existing;
            }
            continue;
        }
        is_after_pattern = true;
        let mut next = Vec::new();
        for directory in found {
            next.extend(matching(location, &directory, name).await?);
        }
        next.sort();
        found = next;
    }
    if found.is_empty() {
        bail!("no file matches `{}` on the server", path.display());
    }
    Ok(found)
}

fn is_pattern(text: &OsStr) -> bool {
    text.as_bytes()
        .iter()
        .any(|byte| matches!(byte, b'*' | b'?' | b'['))
}

/// Entries of a directory that a pattern selects; as in a shell, hidden ones only if the pattern
/// begins with a dot.
async fn matching(
    location: &FilesLocation,
    directory: &Path,
    pattern: &OsStr,
) -> anyhow::Result<Vec<PathBuf>> {
    let text = pattern.to_string_lossy();
    let glob = GlobBuilder::new(&text).literal_separator(true).build();
    let glob = glob.with_context(|| format!("`{text}` is not a valid pattern"))?;
    let glob = glob.compile_matcher();
    let listed = match directory.as_os_str().is_empty() {
        true => location.uri(Path::new(".")).await?,
        false => location.uri(directory).await?,
    };
    // What is no directory has no entries, as for a shell.
    let Ok(entries) = location
        .files
        .read_directory(&listed, Default::default())
        .await
    else {
        return Ok(Vec::new());
    };
    let names = entries.into_iter().filter_map(|entry| match &entry.path {
        None => Some(entry.file_name.into()),
        Some(path) => path.to_native().ok()?.file_name().map(OsStr::to_owned),
    });
    let hidden = pattern.as_bytes().starts_with(b".");
    Ok(names
        .filter(|name| glob.is_match(name) && (hidden || !name.as_bytes().starts_with(b".")))
        .map(|name| directory.join(name))
        .collect())
}
