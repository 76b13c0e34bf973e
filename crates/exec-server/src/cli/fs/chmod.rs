//! `fs chmod`: permissions in octal and symbolic form.

use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::Context as _;
use exec_server_client::fs::{
    AccessOptions, DirectoryPages, Feature, Links, ReadDirectoryOptions, SetMetadata, child,
};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::MetadataResult;

use super::FilesLocation;
use super::args::ChmodArgs;
use crate::cli::error::report;

/// Change of permission bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ModeChange {
    Absolute(u32),
    Symbolic(Vec<ModeClause>),
}

/// One clause, as in `go-w`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModeClause {
    /// Bits of the named users.
    who: u32,
    operation: char,
    /// `rwx` in the lowest three bits.
    bits: u32,
    /// `X`: execution for directories, and files that a user may execute already.
    executes_directories: bool,
    /// Set-id bits, and the sticky bit.
    special: u32,
}

impl FromStr for ModeChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected a mode as in 640 or u+x,go-w".to_owned();
        if text.starts_with(|first: char| first.is_ascii_digit()) {
            let mode = u32::from_str_radix(text, 8).map_err(|_| expected())?;
            return match mode <= 0o7777 {
                true => Ok(Self::Absolute(mode)),
                false => Err(expected()),
            };
        }
        let clauses = text.split(',').map(clause).collect::<Option<Vec<_>>>();
        clauses.map(Self::Symbolic).ok_or_else(expected)
    }
}

fn clause(text: &str) -> Option<ModeClause> {
    let at = text.find(['+', '-', '='])?;
    let (users, rest) = text.split_at(at);
    let mut who = 0;
    for user in users.chars() {
        who |= match user {
            'u' => 0o4700,
            'g' => 0o2070,
            'o' => 0o0007,
            'a' => 0o6777,
            _ => return None,
        };
    }
    let mut characters = rest.chars();
    let mut made = ModeClause {
        who: if users.is_empty() { 0o6777 } else { who },
        operation: characters.next()?,
        bits: 0,
        executes_directories: false,
        special: 0,
    };
    for permission in characters {
        match permission {
            'r' => made.bits |= 4,
            'w' => made.bits |= 2,
            'x' => made.bits |= 1,
            'X' => made.executes_directories = true,
            's' => made.special |= 0o6000 & made.who,
            't' => made.special |= 0o1000,
            _ => return None,
        }
    }
    Some(made)
}

impl ModeChange {
    fn apply(&self, mode: u32, is_directory: bool) -> u32 {
        let clauses = match self {
            Self::Absolute(mode) => return *mode,
            Self::Symbolic(clauses) => clauses,
        };
        clauses.iter().fold(mode, |mode, clause| {
            let mut bits = clause.bits;
            if clause.executes_directories && (is_directory || mode & 0o111 != 0) {
                bits |= 1;
            }
            let bits = (bits * 0o111) & clause.who & 0o777 | clause.special;
            match clause.operation {
                '+' => mode | bits,
                '-' => mode & !bits,
                // As in coreutils, set-id bits of directories stay unless they are named.
                _ if is_directory => mode & !(clause.who & 0o777) | bits,
                _ => mode & !clause.who | bits,
            }
        })
    }
}

pub(super) async fn chmod(location: &FilesLocation, args: &ChmodArgs) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for path in &args.paths {
        if let Err(error) = change(location, path, args).await {
            report(&error);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

async fn change(location: &FilesLocation, path: &Path, args: &ChmodArgs) -> anyhow::Result<()> {
    let failed = || format!("cannot change the mode of `{}`", path.display());
    let root = location.uri(path).await?;
    let found = location
        .files
        .metadata(&root, AccessOptions::default())
        .await
        .with_context(failed)?;
    let is_tree = args.recursive && found.is_directory && !found.is_symlink;
    set(location, &root, &found, args, Links::Follow)
        .await
        .with_context(failed)?;
    if !is_tree {
        return Ok(());
    }
    let root = location
        .files
        .canonicalize(&root, None)
        .await
        .with_context(failed)?;
    let options = ReadDirectoryOptions {
        links: location.files.supports(Feature::ListLinks).await?,
        ..ReadDirectoryOptions::default()
    };
    let mut directories = vec![root];
    while let Some(directory) = directories.pop() {
        let shown = super::shown(&directory);
        let mut pages = DirectoryPages::new(location.files.clone(), &directory, options.clone());
        while let Some(entries) = pages
            .next()
            .await
            .with_context(|| format!("cannot list `{shown}`"))?
        {
            for entry in entries {
                let path = match entry.path {
                    Some(path) => path,
                    None => child(&directory, &entry.file_name)?,
                };
                let failed = || format!("cannot change the mode of `{}`", super::shown(&path));
                let found = location
                    .files
                    .metadata(&path, AccessOptions::default())
                    .await;
                if entry.symlink_target.is_some() || found.as_ref().is_ok_and(|f| f.is_symlink) {
                    continue;
                }
                let found = found.with_context(failed)?;
                set(location, &path, &found, args, Links::Refuse)
                    .await
                    .with_context(failed)?;
                if found.is_directory {
                    directories.push(path);
                }
            }
        }
    }
    Ok(())
}

async fn set(
    location: &FilesLocation,
    path: &PathUri,
    found: &MetadataResult,
    args: &ChmodArgs,
    links: Links,
) -> anyhow::Result<()> {
    let mode = found
        .mode
        .context("the server does not report permissions")?;
    let change = SetMetadata {
        mode: Some(args.mode.apply(mode, found.is_directory)),
        links,
        ..SetMetadata::default()
    };
    Ok(location.files.set_metadata(path, change).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_change_as_chmod_changes_them() {
        for (text, before, is_directory, after) in [
            ("640", 0o777, false, 0o640),
            ("4755", 0, false, 0o4755),
            ("u+x", 0o644, false, 0o744),
            ("go-w", 0o666, false, 0o644),
            ("u=rwX,go=rX", 0o600, false, 0o644),
            ("u=rwX,go=rX", 0o700, true, 0o755),
            ("u=rwX,go=rX", 0o610, false, 0o755),
            ("+x", 0o644, false, 0o755),
            ("a=r", 0o4777, false, 0o444),
            ("g+s", 0o755, true, 0o2755),
            ("g=rx", 0o2775, true, 0o2755),
            ("+t", 0o777, true, 0o1777),
            ("o=", 0o757, false, 0o750),
        ] {
            let change: ModeChange = text.parse().unwrap();
            let changed = change.apply(before, is_directory);
            assert_eq!(changed, after, "{text}: {changed:o}");
        }
        for text in ["", "9", "10000", "u", "z+x", "u+q", "u+x,"] {
            assert!(text.parse::<ModeChange>().is_err(), "{text}");
        }
    }
}
