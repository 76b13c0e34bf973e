//! Websocket echo endpoint for conformance suites, on the same codec and link as the product.
//!
//! `websocket_echo server` listens on a free port of 127.0.0.1, prints its URL and echoes messages
//! until it is killed. `websocket_echo client URL AGENT` runs all cases of an Autobahn fuzzing
//! server at `URL`. `scripts/autobahn` installs the suite and checks its results.

#![expect(clippy::print_stdout, reason = "the caller reads the URL")]

use std::io;

use exec_server_transport::frame::{WebsocketError, WebsocketRole};
use exec_server_transport::http::{HeadKind, accept_key, read_head};
use exec_server_transport::{
    ConnectOptions, Link, LinkError, LinkEvent, LinkReceiver, LinkSender, RawEvent, connect,
};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server"] => serve().await,
        ["client", url, agent] => run_cases(url, agent).await,
        _ => Err("usage: websocket_echo server | client URL AGENT".into()),
    }
}

async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("ws://{}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        // The task ends with its connection.
        tokio::spawn(async move {
            if let Err(error) = accept(stream).await {
                eprintln!("{error}");
            }
        });
    }
}

/// Runs the server side of the handshake, then the echo.
async fn accept(mut stream: TcpStream) -> Result<(), LinkError> {
    let head = read_head(&mut stream, HeadKind::Request).await?;
    let key = head
        .websocket_key()
        .map_err(|missing| io::Error::new(io::ErrorKind::InvalidData, missing))?;
    let response = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: {}\r\n\r\n",
        accept_key(key)
    );
    stream.write_all(response.as_bytes()).await?;
    let (reader, writer) = stream.into_split();
    echo(Link::websocket(
        WebsocketRole::Server,
        reader,
        writer,
        head.rest,
    ))
    .await
}

async fn run_cases(url: &str, agent: &str) -> Result<(), Box<dyn std::error::Error>> {
    let options = ConnectOptions::default();
    let mut link = connect(&format!("{url}/getCaseCount"), &options).await?;
    let count = match link.incoming.recv().await? {
        Some(LinkEvent::Message(text)) => text.trim().parse::<usize>()?,
        other => return Err(format!("the suite sent {other:?} instead of a case count").into()),
    };
    if count == 0 {
        return Err("the suite has no cases".into());
    }
    for case in 1..=count {
        let url = format!("{url}/runCase?case={case}&agent={agent}");
        let link = connect(&url, &options).await?;
        // The suite violates the protocol on purpose and checks what it receives, so this error is
        // only printed.
        if let Err(error) = echo(link).await {
            eprintln!("case {case}: {error}");
        }
    }
    let link = connect(&format!("{url}/updateReports?agent={agent}"), &options).await?;
    Ok(echo(link).await?)
}

/// Sends every message back unchanged, until the peer closes or violates the protocol.
async fn echo(mut link: Link) -> Result<(), LinkError> {
    let ended = echo_messages(&mut link.incoming, &mut link.outgoing).await;
    let code = match &ended {
        Ok(()) if link.incoming.received_close() => Some(1000),
        Err(LinkError::Frame(WebsocketError::Utf8)) => Some(1007),
        Err(LinkError::Frame(
            WebsocketError::FrameTooLarge { .. } | WebsocketError::MessageTooLarge { .. },
        )) => Some(1009),
        Err(LinkError::Frame(_)) => Some(1002),
        _ => None,
    };
    if let Some(code) = code {
        link.outgoing.push_close(code, "");
        link.outgoing.shutdown().await?;
    }
    ended
}

async fn echo_messages(
    incoming: &mut LinkReceiver,
    outgoing: &mut LinkSender,
) -> Result<(), LinkError> {
    while let Some(event) = incoming.recv_raw().await? {
        match event {
            RawEvent::Message { bytes, text: false } => outgoing.push_binary([bytes, &[]]),
            event => match event.decode()? {
                LinkEvent::Message(text) => outgoing.push_message(text.len(), |out| {
                    out.extend_from_slice(text.as_bytes());
                }),
                LinkEvent::Ping(payload) => outgoing.push_pong(payload),
                LinkEvent::NotText | LinkEvent::Pong => {}
            },
        }
        outgoing.flush().await?;
    }
    Ok(())
}
