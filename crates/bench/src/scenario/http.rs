//! HTTP requests that a server makes for its client, compared with direct ones.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use base64_turbo::STANDARD;
use exec_server_egress::http::{HttpClient, HttpConfig, request};
use exec_server_protocol::http::RequestParams;

use super::{Bench, RowSpec, size};
use crate::client::BenchClient;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::stats::median;
use crate::wire::BenchMessage;

/// Bytes of a small body.
const SMALL: usize = 1024;
/// Bytes of one write of the site.
const BLOCK: usize = 256 * 1024;

/// A small request, and a large streamed body.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(400, 150);
    let total: u64 = bench.pick(256 << 20, 64 << 20);
    let lines = vec![
        RowSpec {
            name: "http/request 1 KiB p50, beyond a bare one".to_owned(),
            unit: Unit::Seconds,
            base: "",
            goals: vec![Goal::Value {
                limit: 300e-6,
                aim: 150e-6,
            }],
        },
        RowSpec {
            name: format!("http/request streams {}", size(total)),
            unit: Unit::BytesPerSecond,
            base: "same client",
            goals: vec![Goal::Base {
                limit: 0.3,
                aim: 0.5,
            }],
        },
    ];
    let site = match KeptAliveSite::start(total) {
        Ok(site) => site,
        Err(error) => {
            let failed = Err(format!("no site: {error:#}"));
            return super::rows(lines, vec![failed]);
        }
    };
    let floor = || Ok((bare(&site, count)?, direct(&site, total)?));
    bench.rounds(bench.pick(7, 3), lines, floor, |server, &(bare, direct)| {
        let mut client = server.client()?;
        let small = small(&mut client, &site, count)?;
        let streamed = streamed(&mut client, &site, total)?;
        Ok(vec![
            Figure::plain(small - bare),
            Figure::against(streamed, direct),
        ])
    })
}

/// HTTP server with kept-alive connections: `/small` and `/large`.
pub(super) struct KeptAliveSite {
    pub(super) address: SocketAddr,
}

impl KeptAliveSite {
    /// Starts it; its threads end with this program.
    pub(super) fn start(total: u64) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    // Ends when the client closes.
                    let _ = serve(&stream, total);
                });
            }
        });
        Ok(Self { address })
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

fn serve(stream: &TcpStream, total: u64) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    let block = vec![b'x'; BLOCK];
    let small = [
        format!("HTTP/1.1 200 OK\r\ncontent-length: {SMALL}\r\n\r\n").as_bytes(),
        &block[..SMALL],
    ]
    .concat();
    loop {
        let mut first = String::new();
        reader.read_line(&mut first)?;
        ensure!(!first.is_empty(), "the client closed the connection");
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            ensure!(reader.read_line(&mut line)? > 0, "the request broke off");
        }
        if first.contains(" /large ") {
            write!(writer, "HTTP/1.1 200 OK\r\ncontent-length: {total}\r\n\r\n")?;
            for _ in 0..total / BLOCK as u64 {
                writer.write_all(&block)?;
            }
        } else {
            writer.write_all(&small)?;
        }
    }
}

/// Median seconds of one request on an open connection.
fn bare(site: &KeptAliveSite, count: usize) -> anyhow::Result<f64> {
    let mut stream = TcpStream::connect(site.address)?;
    stream.set_nodelay(true)?;
    let request = format!("GET /small HTTP/1.1\r\nhost: {}\r\n\r\n", site.address);
    let mut buffer = vec![0; 2 * SMALL];
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        stream.write_all(request.as_bytes())?;
        let mut received = 0;
        while received < SMALL {
            let read = stream.read(&mut buffer)?;
            ensure!(read > 0, "the site closed the connection");
            received += read;
        }
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}

fn small(client: &mut BenchClient, site: &KeptAliveSite, count: usize) -> anyhow::Result<f64> {
    let url = site.url("/small");
    let params = format!(r#"{{"method":"GET","url":"{url}","requestId":"small"}}"#);
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        let asked = client.ask("http/request", &params)?;
        client.answer(asked)?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}

/// Bytes per second of the large body through the server's HTTP client, without a server.
fn direct(site: &KeptAliveSite, total: u64) -> anyhow::Result<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let client = HttpClient::new(HttpConfig::default());
    let params = RequestParams {
        method: "GET".to_owned(),
        url: site.url("/large"),
        ..RequestParams::default()
    };
    let prepared = request::prepare(params, &client.config().environment)?;
    runtime.block_on(async {
        let start = Instant::now();
        let mut body = client.send(prepared).await?.body;
        let mut received = 0;
        while let Some(piece) = body.chunk().await? {
            received += piece.len() as u64;
        }
        ensure!(received == total, "{received} bytes came, not {total}");
        Ok(total as f64 / start.elapsed().as_secs_f64())
    })
}

/// Bytes per second of the large body through a server, decoded.
fn streamed(client: &mut BenchClient, site: &KeptAliveSite, total: u64) -> anyhow::Result<f64> {
    let url = site.url("/large");
    let params =
        format!(r#"{{"method":"GET","url":"{url}","requestId":"large","streamResponse":true}}"#);
    let start = Instant::now();
    client.ask("http/request", &params)?;
    let mut received = 0;
    let mut decoded = Vec::new();
    loop {
        if let BenchMessage::Delta { chunk, done } = client.receive()? {
            decoded.resize(chunk.len(), 0);
            let bytes = STANDARD
                .decode_slice(&chunk, &mut decoded)
                .ok()
                .context("a piece is not base64")?;
            received += bytes as u64;
            if done {
                break;
            }
        }
    }
    ensure!(received == total, "{received} bytes came, not {total}");
    Ok(total as f64 / start.elapsed().as_secs_f64())
}
