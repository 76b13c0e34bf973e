//! Measures a meeting point: `crowd PID URL STATE_DIR EXECUTORS HARNESSES ACTIVE SECONDS`.
//!
//! Attaches that many of both to the meeting point with this process id, address and generated
//! tokens; has some of the streams echo, one message at a time each; then sends bulk through one.
//! Prints the meeting point's memory, the percentiles of the echoes and the throughput. The peers speak
//! frames without encryption, so that what is measured is the meeting point and the kernel.

#![expect(
    clippy::unwrap_used,
    reason = "a tool for developers fails by panicking"
)]
#![expect(clippy::print_stdout, reason = "this is what it is for")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::frame::{Acks, Body, Transmit, decode};
use exec_server_relay::keys::{MLKEM768_BYTES, PublicKey, SECURITY_PROFILE};
use exec_server_transport::http::{Kind, read_head};
use exec_server_transport::link::{Link, RawEvent};
use exec_server_transport::{ConnectOptions, connect};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

async fn post(base: &str, token: &str, path: &str, body: &Value) -> Value {
    let host = base.strip_prefix("http://").unwrap();
    let body = body.to_string();
    let length = body.len();
    let mut stream = TcpStream::connect(host).await.unwrap();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
         Authorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(&mut stream, Kind::Response).await.unwrap();
    let mut text = head.rest;
    stream.read_to_end(&mut text).await.unwrap();
    assert_eq!(head.status, 200, "{}", String::from_utf8_lossy(&text));
    serde_json::from_slice(&text).unwrap()
}

fn key(number: usize) -> PublicKey {
    let mut x25519 = [7; 32];
    x25519[..8].copy_from_slice(&(number as u64).to_be_bytes());
    PublicKey::new(x25519, &[7; MLKEM768_BYTES]).unwrap()
}

async fn dial(answer: &Value) -> Link {
    let url = answer["url"].as_str().unwrap();
    connect(url, &ConnectOptions::default()).await.unwrap()
}

async fn send(link: &mut Link, frame: &Transmit) {
    link.outgoing.push_binary(frame.parts());
    link.outgoing.flush().await.unwrap();
}

/// Sends back every record of at most this many bytes, and counts the others.
async fn executor(mut link: Link, bulk: Arc<std::sync::atomic::AtomicU64>) {
    while let Ok(Some(event)) = link.incoming.recv_raw().await {
        let RawEvent::Message { bytes, .. } = event else {
            continue;
        };
        let frame = decode(bytes).unwrap();
        if let Body::Data { seq, payload } = &frame.body {
            if payload.len() > 4096 {
                bulk.fetch_add(payload.len() as u64, Ordering::Relaxed);
                continue;
            }
            let payload = Bytes::copy_from_slice(payload);
            let back = Transmit::data(&frame.stream_id, Acks::default(), *seq, payload);
            send(&mut link, &back).await;
        }
    }
}

fn memory(pid: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let text = line.unwrap().trim().trim_end_matches(" kB");
    text.parse::<u64>().unwrap() / 1024
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [pid, base, state, executors, harnesses, active, seconds] = &args[..] else {
        panic!("crowd PID URL STATE_DIR EXECUTORS HARNESSES ACTIVE SECONDS");
    };
    let number = |text: &str| text.parse::<usize>().unwrap();
    let (executors, harnesses) = (number(executors), number(harnesses));
    let (active, seconds) = (number(active), number(seconds));
    let token = |role: &str| {
        let text = std::fs::read_to_string(format!("{state}/{role}.token")).unwrap();
        text.trim().to_owned()
    };
    let (for_executors, for_harnesses) = (token("executor"), token("harness"));
    println!("alone: {} MiB", memory(pid));

    let began = Instant::now();
    let bulk = Arc::new(std::sync::atomic::AtomicU64::new(0));
    for index in 0..executors {
        let body = json!({
            "security_profile": SECURITY_PROFILE, "executor_public_key": key(index),
        });
        let path = format!("/cloud/environment/env-{index}/register");
        let answer = post(base, &for_executors, &path, &body).await;
        tokio::spawn(executor(dial(&answer).await, Arc::clone(&bulk)));
    }
    println!("{executors} executors: {:.1?}", began.elapsed());
    let began = Instant::now();
    let mut links = Vec::new();
    for index in 0..harnesses {
        let path = format!("/cloud/environment/env-{}/connect", index % executors);
        let body = json!({"harness_public_key": key(1_000_000 + index)});
        let answer = post(base, &for_harnesses, &path, &body).await;
        let mut link = dial(&answer).await;
        let stream = format!("{index:08x}-0000-4000-8000-000000000000");
        send(&mut link, &Transmit::resume(&stream, Acks::default(), 0)).await;
        links.push((link, stream));
    }
    println!("{harnesses} harnesses: {:.1?}", began.elapsed());
    println!("attached: {} MiB", memory(pid));

    // Echoes, each stream ten times a second.
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    let idle = links.split_off(active.min(links.len()));
    for (index, (mut link, stream)) in links.into_iter().enumerate() {
        let stop = Arc::clone(&stop);
        tasks.push(tokio::spawn(async move {
            let mut times = Vec::new();
            tokio::time::sleep(Duration::from_micros(500 * index as u64)).await;
            let mut seq = 0;
            while !stop.load(Ordering::Relaxed) {
                let payload = Bytes::from(vec![1; 64]);
                let began = Instant::now();
                send(
                    &mut link,
                    &Transmit::data(&stream, Acks::default(), seq, payload),
                )
                .await;
                loop {
                    let event = link.incoming.recv_raw().await.unwrap().unwrap();
                    if let RawEvent::Message { .. } = event {
                        break;
                    }
                }
                times.push(began.elapsed());
                seq += 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            (times, link, stream)
        }));
    }
    tokio::time::sleep(Duration::from_secs(seconds as u64)).await;
    println!("active: {} MiB", memory(pid));
    stop.store(true, Ordering::Relaxed);
    let mut times = Vec::new();
    let mut last = None;
    for task in tasks {
        let (more, link, stream) = task.await.unwrap();
        times.extend(more);
        last = Some((link, stream));
    }
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!(
        "{} echoes: p50 {:.2?} p99 {:.2?} max {:.2?}",
        times.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );

    // Bulk through one stream.
    const BULK: u64 = 512 << 20;
    let (mut link, stream) = last.unwrap();
    let payload = Bytes::from(vec![2; 61_456]);
    let began = Instant::now();
    let mut sent = 0;
    let mut seq = 0;
    while sent < BULK {
        let frame = Transmit::data(&stream, Acks::default(), seq, payload.clone());
        seq += 1;
        sent += payload.len() as u64;
        link.outgoing.push_binary(frame.parts());
        if link.outgoing.buffered() > 128 << 10 {
            link.outgoing.flush().await.unwrap();
        }
    }
    link.outgoing.flush().await.unwrap();
    while bulk.load(Ordering::Relaxed) < sent {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let rate = sent as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 20);
    println!("bulk: {rate:.0} MiB/s; after it {} MiB", memory(pid));
    drop(idle);
}
