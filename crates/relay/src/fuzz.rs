//! Fuzz target body: two endpoints, and a script of events between them.
//!
//! Takes arbitrary bytes and panics when a guarantee is violated. `fuzz/` runs it under a fuzzer; a
//! test runs it on the committed seeds.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::endpoint::{
    Endpoint, EndpointEvent, RelayExecutorConfig, RelayHarnessConfig, StreamKey,
};
use crate::frame::{self, Acks, Transmit};
use crate::keys::Authorization;
use crate::limits::EndpointLimits;
use crate::noise::{SEED_BYTES, StaticKeys};

const STREAM: &str = "s";

/// Maximum number of bytes that two endpoints may buffer in queues, windows and behind gaps: 16 MiB.
const BOUND: usize = 16 << 20;

/// Runs a script: each step is a byte that selects an event, followed by its arguments.
///
/// # Panics
///
/// An endpoint panics, exceeds its memory limit, delivers a message that was not sent or is out of
/// order, or the two frame decoders disagree.
pub fn relay(data: &[u8]) {
    let mut script = FuzzScript(data);
    let mut play = FuzzSimulation::new(script.byte());
    while let Some(step) = script.next() {
        play.step(step, &mut script);
        play.settle();
    }
}

struct FuzzScript<'a>(&'a [u8]);

impl<'a> FuzzScript<'a> {
    fn next(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn byte(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    fn bytes(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }
}

struct FuzzSide {
    endpoint: Endpoint,
    stream: Option<StreamKey>,
    /// Messages of this side that the other side has not read.
    sent: VecDeque<Bytes>,
    /// Frames in transit to the other side.
    wire: VecDeque<Vec<u8>>,
    up: bool,
}

struct FuzzSimulation {
    now: Instant,
    /// The harness and the executor.
    sides: [FuzzSide; 2],
    requested: Option<StreamKey>,
    messages: u8,
}

impl FuzzSimulation {
    fn new(choice: u8) -> Self {
        #[expect(clippy::disallowed_methods, reason = "a fake clock starts somewhere")]
        let now = Instant::now();
        let mut limits = EndpointLimits {
            send_bytes: 64 << 10,
            receive_bytes: 64 << 10,
            ..EndpointLimits::default()
        };
        // Key generation dominates the cost of a short script.
        static IDENTITIES: OnceLock<[StaticKeys; 2]> = OnceLock::new();
        let [identity, harness_identity] = IDENTITIES
            .get_or_init(|| [1, 2].map(|n| StaticKeys::from_seed(&[n; SEED_BYTES])))
            .clone();
        let mut counter = 0_u8;
        let mut entropy = move |out: &mut [u8]| {
            counter = counter.wrapping_add(1);
            out.fill(counter);
        };
        let executor_key = identity.public_key().clone();
        let executor = Endpoint::executor(
            RelayExecutorConfig {
                environment_id: "e".into(),
                registration_id: "r".into(),
                identity,
                limits: limits.clone(),
            },
            Box::new(entropy),
        );
        limits.acknowledge = choice & 1 == 0;
        let (harness, stream) = Endpoint::harness(
            RelayHarnessConfig {
                environment_id: "e".into(),
                registration_id: "r".into(),
                stream_id: STREAM.into(),
                identity: harness_identity,
                executor: executor_key,
                authorization: Authorization::new("a").expect("it is short"),
                limits,
            },
            now,
            &mut entropy,
        )
        .expect("the key is a key");
        let side = |endpoint, stream| FuzzSide {
            endpoint,
            stream,
            sent: VecDeque::new(),
            wire: VecDeque::new(),
            up: false,
        };
        let mut play = Self {
            now,
            sides: [side(harness, Some(stream)), side(executor, None)],
            requested: None,
            messages: 0,
        };
        for at in [0, 1] {
            play.socket(at);
        }
        // Most scripts begin with an open stream; the others cover the handshake.
        if choice & 2 == 0 {
            play.settle();
            for _ in 0..4 {
                play.deliver(0, None);
                play.admit();
                play.deliver(1, None);
            }
        }
        play
    }

    fn socket(&mut self, at: usize) {
        let side = &mut self.sides[at];
        side.up = !side.up;
        if side.up {
            side.endpoint.socket_up(self.now);
        } else {
            side.endpoint.socket_lost();
            for side in &mut self.sides {
                side.wire.clear();
            }
        }
    }

    fn admit(&mut self) {
        self.settle();
        if let Some(stream) = self.requested.take() {
            self.sides[1].endpoint.admit(self.now, stream);
        }
        self.settle();
    }

    /// Delivers the oldest frame of a side, optionally with one bit flipped.
    fn deliver(&mut self, from: usize, flip: Option<u16>) {
        let Some(mut frame) = self.sides[from].wire.pop_front() else {
            return;
        };
        if let Some(flip) = flip {
            let bit = usize::from(flip) % (frame.len() * 8);
            frame[bit / 8] ^= 1 << (bit % 8);
        }
        self.receive(1 - from, &frame);
    }

    fn receive(&mut self, at: usize, bytes: &[u8]) {
        frame::check_decoders_agree(bytes);
        if self.sides[at].up {
            let valid = frame::decode(bytes).is_ok();
            let taken = self.sides[at].endpoint.handle_frame(self.now, bytes);
            assert_eq!(taken.is_ok(), valid);
        }
        self.settle();
    }

    fn step(&mut self, step: u8, script: &mut FuzzScript<'_>) {
        let at = usize::from(step & 1);
        match step >> 1 & 15 {
            0 => self.receive(at, script.bytes()),
            1 => {
                let acks = Acks {
                    ack: script.byte().into(),
                    bits: u32::from_be_bytes([script.byte(), 0, 0, script.byte()]),
                    credit: u64::from(script.byte()) << (script.byte() & 31),
                };
                let id = ["s", "t"][usize::from(script.byte() & 1)];
                let number = u32::from(script.byte());
                let frame = match script.byte() % 6 {
                    0 => Transmit::data(id, acks, number, script.bytes().to_vec().into()),
                    1 => Transmit::ack(id, acks),
                    2 => Transmit::resume(id, acks, number),
                    3 => Transmit::heartbeat(id, acks),
                    4 => Transmit::handshake(id, acks, script.bytes().to_vec().into()),
                    _ => Transmit::reset(id, &String::from_utf8_lossy(script.bytes())),
                };
                self.receive(at, &frame.to_vec());
            }
            2 => {
                self.now += Duration::from_millis(1 << (script.byte() & 15));
                for side in &mut self.sides {
                    side.endpoint.handle_timeout(self.now);
                }
            }
            3 => self.socket(at),
            4 | 5 => self.send(at, usize::from(script.byte()) << (script.byte() & 7)),
            6 => self.admit(),
            7 => drop(self.sides[at].wire.pop_front()),
            8 => {
                let flip = u16::from_be_bytes([script.byte(), script.byte()]);
                self.deliver(at, Some(flip));
            }
            9 => {
                // Duplicates a frame.
                if let Some(frame) = self.sides[at].wire.front().cloned() {
                    self.sides[at].wire.push_back(frame);
                }
            }
            10 => {
                // Reorders a frame.
                if let Some(frame) = self.sides[at].wire.pop_front() {
                    self.sides[at].wire.push_back(frame);
                }
            }
            11 => {
                if let Some(stream) = self.sides[at].stream {
                    self.sides[at].endpoint.close(self.now, stream);
                }
            }
            _ => {
                for _ in 0..=script.byte() & 7 {
                    self.deliver(at, None);
                }
            }
        }
    }

    fn send(&mut self, at: usize, length: usize) {
        let side = &mut self.sides[at];
        let Some(stream) = side.stream else {
            return;
        };
        self.messages = self.messages.wrapping_add(1);
        let message = Bytes::from(vec![self.messages; length]);
        let sent = side
            .endpoint
            .send_message(self.now, stream, message.clone());
        if sent.is_ok() {
            side.sent.push_back(message);
        }
    }

    /// Drains the output of both endpoints.
    fn settle(&mut self) {
        for at in [0, 1] {
            let mut received = Vec::new();
            let side = &mut self.sides[at];
            while let Some(event) = side.endpoint.poll_event() {
                match event {
                    EndpointEvent::AdmissionRequested { stream, .. } => {
                        self.requested = Some(stream)
                    }
                    EndpointEvent::Opened { stream, .. } => side.stream = Some(stream),
                    EndpointEvent::Closed { stream, unread, .. } if side.stream == Some(stream) => {
                        received.extend(unread);
                        side.stream = None;
                    }
                    _ => {}
                }
            }
            if let Some(stream) = side.stream {
                while let Some(message) = side.endpoint.read_message(self.now, stream) {
                    received.push(message);
                }
            }
            while let Some(transmit) = side.endpoint.poll_transmit(self.now) {
                assert!(transmit.len() <= crate::limits::MAX_FRAME_BYTES);
                // The network drops frames beyond 256.
                if side.wire.len() < 256 {
                    side.wire.push_back(transmit.to_vec());
                }
            }
            assert!(side.endpoint.buffered_bytes() < BOUND);
            assert!(side.endpoint.stream_count() <= 2);
            for message in received {
                let expected = self.sides[1 - at].sent.pop_front();
                assert_eq!(Some(message), expected, "not what was sent");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::fuzz::replay;

    use super::relay;

    #[test]
    fn relay_keeps_its_guarantees_on_all_seeds() {
        replay("relay", relay);
    }

    #[test]
    fn script_without_faults_delivers_its_messages() {
        // Both directions: send, deliver.
        relay(&[0, 8, 9, 0, 9, 200, 3, 24, 7, 25, 7, 24, 7, 25, 7]);
    }
}
