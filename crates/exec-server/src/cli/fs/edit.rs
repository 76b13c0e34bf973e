//! `fs edit`: a file of a server in an editor of this machine.
//!
//! The copy on this machine is readable for its user only. The file is replaced atomically and keeps
//! its owner and mode; what was edited is never lost.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use exec_server_client::fs::{CreateDirectoryOptions, RemoveOptions, WriteOptions, child, uri};
use exec_server_client::{ExecutorFileSystem as _, LocalFileSystem};
use exec_server_protocol::PathUri;
use tokio::signal::unix::{SignalKind, signal};

use super::FilesLocation;
use super::args::EditArgs;
use crate::cli::error::notice;
use crate::cli::settings::variable;

pub(super) async fn edit(location: &FilesLocation, args: &EditArgs) -> anyhow::Result<ExitCode> {
    let shown = args.path.display();
    let path = location.uri(&args.path).await?;
    let before = read(location, &path)
        .await
        .with_context(|| format!("cannot edit `{shown}`"))?;
    let name = args.path.file_name().context("give the path of a file")?;
    let here = LocalFileSystem::new();
    let directory = private_directory(&here).await?;
    let copy = child(&directory, name)?;
    let options = WriteOptions {
        create_mode: Some(0o600),
        ..WriteOptions::default()
    };
    let content = before.clone().unwrap_or_default();
    here.write_file(&copy, content, options)
        .await
        .context("cannot write the copy to edit")?;
    let native = copy.to_native()?;
    let saved = format!("the edited copy is `{}`", native.display());

    run_editor(&native)
        .await
        .with_context(|| format!("`{shown}` is unchanged; {saved}"))?;
    let edited = here.read_file(&copy, Default::default()).await;
    let edited = edited.with_context(|| format!("cannot read `{}`", native.display()))?;
    if Some(&edited) == before.as_ref() || (before.is_none() && edited.is_empty()) {
        notice(&format!("`{shown}` is unchanged"));
    } else {
        let now = read(location, &path).await.with_context(|| saved.clone())?;
        if now != before {
            bail!(
                "`{shown}` was changed on the server while it was edited: merge by hand; {saved}"
            );
        }
        let written = location
            .files
            .write_file(&path, edited, WriteOptions::default())
            .await;
        written.with_context(|| format!("cannot write `{shown}`; {saved}"))?;
    }
    let options = RemoveOptions {
        recursive: true,
        ..RemoveOptions::default()
    };
    let removed = here.remove(&directory, options).await;
    removed.context("cannot remove the edited copy")?;
    Ok(ExitCode::SUCCESS)
}

/// The content of a file; `None` if it does not exist.
async fn read(location: &FilesLocation, path: &PathUri) -> anyhow::Result<Option<Bytes>> {
    match location.files.read_file(path, Default::default()).await {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A new directory that only this user can enter.
async fn private_directory(here: &LocalFileSystem) -> anyhow::Result<PathUri> {
    let parent = variable("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let name = format!("exec-server-edit-{}-{}", std::process::id(), now.as_nanos());
    let directory = uri(std::path::absolute(parent.join(name))?)?;
    let options = CreateDirectoryOptions {
        // Fails if the directory exists, so that it is not one of another user.
        recursive: false,
        create_mode: Some(0o700),
        ..CreateDirectoryOptions::default()
    };
    let made = here.create_directory(&directory, options).await;
    made.with_context(|| format!("cannot create a directory in `{}`", parent.display()))?;
    Ok(directory)
}

async fn run_editor(path: &Path) -> anyhow::Result<()> {
    let named = |name| variable(name).filter(|editor| !editor.trim().is_empty());
    let editor = named("VISUAL")
        .or_else(|| named("EDITOR"))
        .unwrap_or_else(|| "vi".to_owned());
    // An interrupt is for the editor.
    let _interrupts = signal(SignalKind::interrupt())?;
    // The variables may contain options, as in `code --wait`.
    let status = tokio::process::Command::new("/bin/sh")
        .arg("-c")
        .arg(format!("{editor} \"$1\""))
        .arg("sh")
        .arg(path)
        .status()
        .await
        .with_context(|| format!("cannot start the editor `{editor}`"))?;
    if !status.success() {
        bail!("the editor `{editor}` ended with {status}: set EDITOR to another one");
    }
    Ok(())
}
