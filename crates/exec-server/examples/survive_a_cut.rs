//! A command continues while its connection is lost, and all of its output arrives.
//!
//!     cargo run --example survive_a_cut
//!
//! Starts a server in this program and connects to it through a TCP forwarder, which closes its connections twice
//! while a command runs. The client reconnects by itself.

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::net::SocketAddr;

use exec_server::protocol::process::StartParams;
use exec_server::{
    ExecBackend as _, ExecProcessEvent, ExecServer, ExecServerClient, ExecServerConfig, Listener,
    RemoteExecServerConnectArgs,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const LINES: usize = 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let output = survive().await?;
    println!(
        "{} lines arrived, the last one is {:?}",
        output.len(),
        output.last()
    );
    Ok(())
}

/// Runs a command over a connection that is cut twice; returns the lines of its output.
async fn survive() -> Result<Vec<String>, Box<dyn Error>> {
    let listener = Listener::tcp(([127, 0, 0, 1], 0).into(), false).await?;
    let address = listener.url().to_string();
    let address = address.trim_start_matches("ws://").trim_end_matches('/');
    tokio::spawn(listener.serve(ExecServer::new(ExecServerConfig::default())?));
    let (cut, url) = forward(address.parse()?).await?;

    let client =
        ExecServerClient::connect(RemoteExecServerConnectArgs::new(url, "example")).await?;
    // A program can follow the state of the connection, for example to display it.
    let mut states = client.states();
    tokio::spawn(async move {
        while let Some(state) = states.recv().await {
            eprintln!("the connection is {state}");
        }
    });

    let script = format!("for i in $(seq {LINES}); do echo line $i; sleep 0.05; done");
    let params = StartParams {
        process_id: "counting".to_owned(),
        argv: ["/bin/sh", "-c", &script].map(str::to_owned).to_vec(),
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        ..StartParams::default()
    };
    let process = client.start(params).await?.process;
    let mut events = process.events()?;
    let mut seen = String::new();
    while let Some(event) = events.recv().await {
        match event {
            ExecProcessEvent::Output { chunk, .. } => {
                seen.push_str(&String::from_utf8_lossy(&chunk));
                if matches!(seen.lines().count(), 5 | 12) {
                    cut.send_replace(());
                }
            }
            // Output that the server evicted while no client was connected. This takes more than a
            // megabyte of output.
            ExecProcessEvent::Gap { bytes, .. } => return Err(format!("{bytes:?} are lost").into()),
            ExecProcessEvent::Failed(failure) => return Err(failure.into()),
            _ => {}
        }
    }
    Ok(seen.lines().map(str::to_owned).collect())
}

/// Starts a TCP forwarder to a server. Returns its URL, and a sender whose changes close all its connections.
async fn forward(server: SocketAddr) -> std::io::Result<(watch::Sender<()>, String)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("ws://{}", listener.local_addr()?);
    let cut = watch::Sender::new(());
    let cuts = cut.clone();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut cut = cuts.subscribe();
            tokio::spawn(async move {
                let mut server = TcpStream::connect(server).await?;
                tokio::select! {
                    carried = tokio::io::copy_bidirectional(&mut client, &mut server) => {
                        carried.map(|_| ())
                    }
                    _ = cut.changed() => Ok(()),
                }
            });
        }
    });
    Ok((cut, url))
}

#[cfg(test)]
#[tokio::test]
async fn every_line_arrives_once() {
    let expected: Vec<_> = (1..=LINES).map(|number| format!("line {number}")).collect();
    assert_eq!(survive().await.expect("all output"), expected);
}
