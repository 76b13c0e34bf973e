//! Copies a directory to an execution server, changes a file there as a stream, and copies it back.
//!
//! ```text
//! cargo run -p exec-server-client --example files -- ws://127.0.0.1:4600 src /tmp/src /tmp/back
//! cargo run -p exec-server-client --example files -- local src /tmp/src /tmp/back
//! ```
//!
//! The first argument is the URL of the server, or `local` for this machine without a server.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use exec_server_client::fs::{
    ExecutorFileSystem, LocalFileSystem, WriteMode, WriteStreamOptions, child, uri,
};
use exec_server_client::transfer::{TransferOptions, TransferReport, download, upload};
use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: files SERVER|local SOURCE REMOTE BACK";
    let server = args.next().ok_or(usage)?;
    let source = PathBuf::from(args.next().ok_or(usage)?);
    let remote = uri(args.next().ok_or(usage)?)?;
    let back = PathBuf::from(args.next().ok_or(usage)?);

    let files: Arc<dyn ExecutorFileSystem> = if server == "local" {
        Arc::new(LocalFileSystem::new())
    } else {
        let args = RemoteExecServerConnectArgs::new(server, "files-example");
        Arc::new(ExecServerClient::connect(args).await?.file_system())
    };

    let mut options = TransferOptions::default();
    options.recursive = true;
    options.archive = true;
    options.progress = Some(Arc::new(|progress| {
        if progress.files == progress.total_files {
            eprintln!("{} files, {} bytes", progress.files, progress.bytes);
        }
    }));
    let sent = upload(&source, files.clone(), &remote, options.clone()).await?;
    complain(&sent);

    // Append to the file through a write stream.
    let note = child(&remote, "NOTE")?;
    files
        .write_file(&note, "copied\n".into(), Default::default())
        .await?;
    let append = WriteStreamOptions {
        mode: WriteMode::Update,
        offset: files.metadata(&note, Default::default()).await?.size,
        sandbox: None,
        ..WriteStreamOptions::default()
    };
    let mut writer = files.open_write(&note, append).await?;
    writer.write_all(b"and changed\n").await?;
    writer.commit().await?;
    let mut text = String::new();
    let mut reader = files.open_read(&note, Default::default()).await?;
    reader.read_to_string(&mut text).await?;
    assert_eq!(text, "copied\nand changed\n");

    let fetched = download(files, &remote, &back, options).await?;
    complain(&fetched);
    eprintln!("{} files there, {} back", sent.files, fetched.files);
    Ok(())
}

fn complain(report: &TransferReport) {
    for failure in &report.failures {
        eprintln!("not copied: {failure}");
    }
}
