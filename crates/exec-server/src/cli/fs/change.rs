//! `fs mkdir`, `fs rm`, `fs mv`, `fs cp`: changes of files within the server.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use exec_server_client::fs::{
    CopyOptions, CreateDirectoryOptions, RemoveOptions, RenameOptions, SetMetadata,
};
use exec_server_protocol::PathUri;

use super::args::{CpThereArgs, MkdirArgs, MvArgs, RmArgs};
use super::{FilesLocation, sources_and_target};
use crate::cli::error::report;

pub(super) async fn rm(location: &FilesLocation, args: &RmArgs) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for path in &args.paths {
        if let Err(error) = remove(location, path, args).await {
            report(&error);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

async fn remove(location: &FilesLocation, path: &Path, args: &RmArgs) -> anyhow::Result<()> {
    let uri = location.uri(path).await?;
    if !args.recursive {
        // The server would remove an empty directory like a file; users of `rm` expect an error.
        let found = location.files.metadata(&uri, Default::default()).await;
        if found.is_ok_and(|found| found.is_directory && !found.is_symlink) {
            bail!(
                "cannot remove `{}`: it is a directory (use -r)",
                path.display()
            );
        }
    }
    let options = RemoveOptions {
        recursive: args.recursive,
        force: args.force,
        ..RemoveOptions::default()
    };
    location
        .files
        .remove(&uri, options)
        .await
        .with_context(|| format!("cannot remove `{}`", path.display()))
}

pub(super) async fn mkdir(location: &FilesLocation, args: &MkdirArgs) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for path in &args.paths {
        if let Err(error) = make(location, path, args).await {
            report(&error);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

async fn make(location: &FilesLocation, path: &Path, args: &MkdirArgs) -> anyhow::Result<()> {
    let failed = || format!("cannot create `{}`", path.display());
    let uri = location.uri(path).await?;
    let options = CreateDirectoryOptions {
        recursive: args.parents,
        ..CreateDirectoryOptions::default()
    };
    let is_new = !location.is_directory(&uri).await;
    let made = location.files.create_directory(&uri, options).await;
    made.with_context(failed)?;
    // As with `mkdir`, an existing directory keeps its mode.
    let Some(mode) = args.mode.filter(|_| is_new) else {
        return Ok(());
    };
    let change = SetMetadata {
        mode: Some(mode),
        ..SetMetadata::default()
    };
    location
        .files
        .set_metadata(&uri, change)
        .await
        .with_context(failed)
}

pub(super) async fn mv(location: &FilesLocation, args: &MvArgs) -> anyhow::Result<ExitCode> {
    let options = RenameOptions {
        overwrite: !args.no_clobber,
        sandbox: None,
    };
    for (from, source, to) in pairs(location, &args.paths).await? {
        location
            .files
            .rename(&source, &to, options.clone())
            .await
            .with_context(|| format!("cannot move `{}`", from.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn cp(location: &FilesLocation, args: &CpThereArgs) -> anyhow::Result<ExitCode> {
    let options = CopyOptions {
        recursive: args.recursive,
        sandbox: None,
        ..CopyOptions::default()
    };
    for (from, source, to) in pairs(location, &args.paths).await? {
        if !args.recursive && location.is_directory(&source).await {
            bail!(
                "cannot copy `{}`: it is a directory (use -r)",
                from.display()
            );
        }
        location
            .files
            .copy(&source, &to, options.clone())
            .await
            .with_context(|| format!("cannot copy `{}`", from.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Pairs of source and destination, as `mv` and `cp` combine them.
async fn pairs<'a>(
    location: &FilesLocation,
    paths: &'a [std::path::PathBuf],
) -> anyhow::Result<Vec<(&'a Path, PathUri, PathUri)>> {
    let (sources, target) = sources_and_target(paths)?;
    if sources.len() > 1 && !location.is_directory(&location.uri(target).await?).await {
        bail!("`{}` is not a directory", target.display());
    }
    let mut pairs = Vec::new();
    for source in sources {
        let to = location.destination(source, target).await?;
        pairs.push((source.as_path(), location.uri(source).await?, to));
    }
    Ok(pairs)
}
