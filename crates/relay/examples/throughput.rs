//! Throughput of one stream on one core, without a network: `cargo run --release --example
//! throughput -p exec-server-relay`.
#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "prints a measurement"
)]

use std::time::Instant;

use bytes::Bytes;
use exec_server_relay::keys::Authorization;
use exec_server_relay::noise::StaticKeys;
use exec_server_relay::{
    Endpoint, EndpointEvent, EndpointLimits, RelayExecutorConfig, RelayHarnessConfig, SendError,
};

/// Deterministic bytes, not random ones; never use them for real keys.
fn entropy() -> impl FnMut(&mut [u8]) + Send {
    let mut state = 1_u64;
    move |out: &mut [u8]| {
        for byte in out {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
    }
}

fn main() {
    for acknowledge in [true, false] {
        for size in [200, 4 << 10, 64 << 10, 1 << 20] {
            run(acknowledge, size);
        }
    }
    let start = Instant::now();
    let count = 200;
    for _ in 0..count {
        open(true);
    }
    let each = start.elapsed() / count;
    println!("handshake, both ends and two new identities: {each:?}");
}

fn open(acknowledge: bool) -> (Endpoint, Endpoint, [exec_server_relay::StreamKey; 2]) {
    let now = Instant::now();
    let mut limits = EndpointLimits::default();
    limits.acknowledge = acknowledge;
    let mut random = entropy();
    let identity = StaticKeys::generate(&mut random);
    let key = identity.public_key().clone();
    let mut executor = Endpoint::executor(
        RelayExecutorConfig {
            environment_id: "e".into(),
            registration_id: "r".into(),
            identity,
            limits: limits.clone(),
        },
        Box::new(entropy()),
    );
    let (mut harness, here) = Endpoint::harness(
        RelayHarnessConfig {
            environment_id: "e".into(),
            registration_id: "r".into(),
            stream_id: "0b2f3c6e-0000-4000-8000-000000000001".into(),
            identity: StaticKeys::generate(&mut random),
            executor: key,
            authorization: Authorization::new("a").unwrap(),
            limits,
        },
        now,
        &mut random,
    )
    .unwrap();
    harness.socket_up(now);
    executor.socket_up(now);
    while let Some(frame) = harness.poll_transmit(now) {
        executor.handle_frame(now, &frame.to_vec()).unwrap();
    }
    let Some(EndpointEvent::AdmissionRequested { stream, .. }) = executor.poll_event() else {
        panic!("no admission request");
    };
    executor.admit(now, stream);
    while let Some(frame) = executor.poll_transmit(now) {
        harness.handle_frame(now, &frame.to_vec()).unwrap();
    }
    (harness, executor, [here, stream])
}

fn run(acknowledge: bool, size: usize) {
    const TOTAL: usize = 512 << 20;
    let (mut harness, mut executor, [here, there]) = open(acknowledge);
    let message = Bytes::from(vec![b'x'; size]);
    let count = (TOTAL / size).min(500_000);
    let (mut sent, mut received) = (0, 0);
    let mut wire = Vec::new();
    let start = Instant::now();
    while received < count {
        let now = Instant::now();
        while sent < count {
            match executor.send_message(now, there, message.clone()) {
                Ok(()) => sent += 1,
                Err(SendError::Full(_)) => break,
                Err(error) => panic!("{error}"),
            }
        }
        // One copy into the socket's buffer, as a real driver does.
        while let Some(frame) = executor.poll_transmit(now) {
            wire.clear();
            frame.write_to(&mut wire);
            harness.handle_frame(now, &wire).unwrap();
        }
        while harness.read_message(now, here).is_some() {
            received += 1;
        }
        while let Some(frame) = harness.poll_transmit(now) {
            executor.handle_frame(now, &frame.to_vec()).unwrap();
        }
        while executor.poll_event().is_some() || harness.poll_event().is_some() {}
    }
    let seconds = start.elapsed().as_secs_f64();
    let mib = (count * size) as f64 / f64::from(1 << 20);
    println!(
        "{} messages of {size} bytes: {:.0} MiB/s, {:.2} us each",
        if acknowledge {
            "reliable  "
        } else {
            "compatible"
        },
        mib / seconds,
        seconds * 1e6 / count as f64
    );
}
