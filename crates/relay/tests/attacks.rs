//! What whoever sits between the ends, or dials in, may try.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::frame::{Acks, Body, Transmit, decode};
use exec_server_relay::keys::Authorization;
use exec_server_relay::noise::Identity;
use exec_server_relay::{Endpoint, Event, HarnessConfig, Limits, Mode, Reason, StreamKey};
use support::*;

const LONG: Duration = Duration::from_secs(1000);

/// All frames that an end wants to send.
fn frames(endpoint: &mut Endpoint, now: Instant) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| endpoint.poll_transmit(now))
        .map(|t| t.to_vec())
        .collect()
}

fn events(endpoint: &mut Endpoint) -> Vec<Event> {
    std::iter::from_fn(|| endpoint.poll_event()).collect()
}

/// The reasons of the resets among `frames`, with the streams they are for.
fn resets(frames: &[Vec<u8>]) -> Vec<(String, Reason)> {
    frames
        .iter()
        .filter_map(|frame| {
            let frame = decode(frame).unwrap();
            match frame.body {
                Body::Reset { reason } => {
                    Some((frame.stream_id.into_owned(), Reason::parse(&reason)))
                }
                _ => None,
            }
        })
        .collect()
}

struct Stage {
    now: Instant,
    executor: Endpoint,
    identity: Identity,
}

impl Stage {
    fn new(limits: Limits) -> Self {
        let now = epoch();
        let (mut executor, identity) = executor_with(limits, 77);
        executor.socket_up(now);
        Self {
            now,
            executor,
            identity,
        }
    }

    /// A harness and its first frames, which nobody has seen yet.
    fn harness(&self, stream_id: &str, seed: u64) -> (Endpoint, StreamKey, Vec<Vec<u8>>) {
        let (mut harness, stream) =
            harness_with(Limits::default(), &self.identity, stream_id, self.now, seed);
        harness.socket_up(self.now);
        let first = frames(&mut harness, self.now);
        assert_eq!(first.len(), 2, "resume and handshake");
        (harness, stream, first)
    }

    fn deliver(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let _ = self.executor.handle_frame(self.now, frame);
        frames(&mut self.executor, self.now)
    }

    /// Opens a stream all the way, with one message from the harness.
    fn open(&mut self, stream_id: &str, seed: u64) -> (Endpoint, StreamKey, StreamKey) {
        let (mut harness, here, first) = self.harness(stream_id, seed);
        for frame in &first {
            self.deliver(frame);
        }
        let there = events(&mut self.executor)
            .into_iter()
            .find_map(|event| match event {
                Event::Asked { stream, .. } => Some(stream),
                _ => None,
            })
            .unwrap();
        self.executor.admit(self.now, there);
        for frame in frames(&mut self.executor, self.now) {
            harness.handle_frame(self.now, &frame).unwrap();
        }
        harness
            .send_message(self.now, here, Bytes::from_static(b"first"))
            .unwrap();
        for frame in frames(&mut harness, self.now) {
            self.deliver(&frame);
        }
        assert_eq!(
            self.executor.read_message(self.now, there).unwrap(),
            &b"first"[..]
        );
        events(&mut self.executor);
        events(&mut harness);
        (harness, here, there)
    }
}

#[test]
fn a_replayed_handshake_gets_nothing_and_costs_nothing() {
    let mut stage = Stage::new(Limits::default());
    let (mut harness, _, first) = stage.harness(STREAM, 1);
    stage.deliver(&first[1]);
    let [Event::Asked { stream, .. }] = &events(&mut stage.executor)[..] else {
        panic!("not asked")
    };
    let stream = *stream;
    // While it is pending: taken as a repetition, not asked again.
    stage.deliver(&first[1]);
    assert!(events(&mut stage.executor).is_empty());
    stage.executor.admit(stage.now, stream);
    let reply = frames(&mut stage.executor, stage.now);
    // While it is open: the very same answer again, which only the first harness can use.
    let again = stage.deliver(&first[1]);
    let payload = |frame: &[u8]| match decode(frame).unwrap().body {
        Body::Handshake { payload } => payload.into_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(payload(&again[0]), payload(&reply[0]));
    assert_eq!(stage.executor.stream_count(), 1);
    harness.handle_frame(stage.now, &reply[0]).unwrap();
    assert!(matches!(
        events(&mut harness)[..],
        [Event::Opened {
            mode: Mode::Reliable,
            ..
        }]
    ));
    // After it is over.
    stage.executor.reset(stream, Reason::ShuttingDown);
    frames(&mut stage.executor, stage.now);
    let answer = stage.deliver(&first[1]);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), Reason::HandshakeReplayed)]
    );
    // One that was not seen before does not decrypt for any other stream.
    let (_, _, unseen) = stage.harness(STREAM, 2);
    let greeting = payload(&unseen[1]);
    let moved = Transmit::handshake("another", Acks::default(), greeting.into()).to_vec();
    assert_eq!(
        resets(&stage.deliver(&moved)),
        [("another".to_owned(), Reason::HandshakeFailed)]
    );
    assert_eq!(stage.executor.stream_count(), 0);
}

#[test]
fn a_replayer_cannot_hold_a_stream_that_it_cannot_use() {
    let mut stage = Stage::new(Limits::default());
    let (_, _, first) = stage.harness(STREAM, 1);
    stage.deliver(&first[1]);
    let [Event::Asked { stream, .. }] = events(&mut stage.executor)[..] else {
        panic!("not asked")
    };
    stage.executor.admit(stage.now, stream);
    frames(&mut stage.executor, stage.now);
    // Signs of life that need no key do not count.
    for _ in 0..40 {
        stage.now += Duration::from_secs(1);
        stage.executor.handle_timeout(stage.now);
        stage.deliver(&Transmit::heartbeat(STREAM, Acks::default()).to_vec());
    }
    assert_eq!(stage.executor.stream_count(), 0);
    assert!(events(&mut stage.executor).iter().any(|event| matches!(
        event,
        Event::Closed {
            reason: Reason::HandshakeTimeout,
            ..
        }
    )));
}

#[test]
fn a_stolen_authorization_comes_with_the_key_of_the_thief() {
    let mut stage = Stage::new(Limits::default());
    let mut random = entropy(9);
    let thief = Identity::generate(&mut random);
    let config = HarnessConfig {
        environment_id: ENVIRONMENT.into(),
        registration_id: REGISTRATION.into(),
        stream_id: "thief".into(),
        identity: thief.clone(),
        executor: stage.identity.public_key().clone(),
        authorization: Authorization::new("stolen").unwrap(),
        limits: Limits::default(),
    };
    let (mut harness, _) = Endpoint::harness(config, stage.now, &mut random).unwrap();
    harness.socket_up(stage.now);
    for frame in frames(&mut harness, stage.now) {
        stage.deliver(&frame);
    }
    let [
        Event::Asked {
            stream,
            harness: key,
            authorization,
            ..
        },
    ] = &events(&mut stage.executor)[..]
    else {
        panic!("not asked")
    };
    // The registry sees that the two do not belong together.
    assert_eq!(authorization.reveal(), "stolen");
    assert_eq!(key, thief.public_key());
    let stream = *stream;
    stage
        .executor
        .refuse(stage.now, stream, Reason::AuthorizationRefused);
    let answer = frames(&mut stage.executor, stage.now);
    assert_eq!(
        resets(&answer),
        [("thief".to_owned(), Reason::AuthorizationRefused)]
    );
    for frame in answer {
        harness.handle_frame(stage.now, &frame).unwrap();
    }
    let [
        Event::Closed {
            reason,
            by_peer: true,
            ..
        },
    ] = &events(&mut harness)[..]
    else {
        panic!("not closed")
    };
    assert!(!reason.is_retryable());
}

#[test]
fn the_stream_id_of_another_harness_opens_nothing_and_harms_nobody() {
    let mut stage = Stage::new(Limits::default());
    let (mut victim, here, there) = stage.open(STREAM, 1);
    let (mut thief, _, first) = stage.harness(STREAM, 2);
    for frame in &first {
        let answer = stage.deliver(frame);
        assert_eq!(resets(&answer), [], "a reset would reach the victim");
        for frame in answer {
            thief.handle_frame(stage.now, &frame).unwrap();
            victim.handle_frame(stage.now, &frame).unwrap();
        }
    }
    assert!(events(&mut thief).is_empty());
    assert!(events(&mut stage.executor).is_empty());
    victim
        .send_message(stage.now, here, Bytes::from_static(b"still me"))
        .unwrap();
    for frame in frames(&mut victim, stage.now) {
        stage.deliver(&frame);
    }
    assert_eq!(
        stage.executor.read_message(stage.now, there).unwrap(),
        &b"still me"[..]
    );
}

#[test]
fn a_handshake_for_another_registration_is_refused() {
    let mut stage = Stage::new(Limits::default());
    let (_, _, first) = stage.harness(STREAM, 1);
    stage.executor.set_registration_id("registration-2".into());
    let answer = stage.deliver(&first[1]);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), Reason::HandshakeFailed)]
    );
}

#[test]
fn another_executor_cannot_answer() {
    let stage = Stage::new(Limits::default());
    let (mut harness, _, first) = stage.harness(STREAM, 1);
    let (mut other, _) = executor_with(Limits::default(), 1234);
    other.socket_up(stage.now);
    other.handle_frame(stage.now, &first[1]).unwrap();
    let answer = frames(&mut other, stage.now);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), Reason::HandshakeFailed)]
    );
    // Nor can anyone make an answer up.
    let forged = Transmit::handshake(STREAM, Acks::default(), vec![7; 3424].into()).to_vec();
    harness.handle_frame(stage.now, &forged).unwrap();
    assert!(matches!(
        events(&mut harness)[..],
        [Event::Closed {
            reason: Reason::HandshakeFailed,
            ..
        }]
    ));
}

#[test]
fn ten_thousand_bad_handshakes_cost_a_bounded_number_of_decryptions() {
    let mut stage = Stage::new(Limits::default());
    let (mut friend, here, there) = stage.open("friend", 1);
    let mut unseen = 0;
    for n in 0..10_000_u32 {
        let mut message = vec![1; 3600];
        message[..4].copy_from_slice(&n.to_be_bytes());
        let frame = Transmit::handshake(&format!("s{n}"), Acks::default(), message.into());
        let answer = stage.deliver(&frame.to_vec());
        let [(_, reason)] = &resets(&answer)[..] else {
            panic!("no reset")
        };
        unseen += u32::from(*reason == Reason::HandshakeCooldown);
    }
    assert_eq!(unseen, 10_000 - 64);
    assert_eq!(stage.executor.stream_count(), 1);
    // Those who are in do not notice, and a second later others may try again.
    friend
        .send_message(stage.now, here, Bytes::from_static(b"hi"))
        .unwrap();
    for frame in frames(&mut friend, stage.now) {
        stage.deliver(&frame);
    }
    assert_eq!(
        stage.executor.read_message(stage.now, there).unwrap(),
        &b"hi"[..]
    );
    stage.now += Duration::from_secs(1);
    stage.open("late", 5);
}

#[test]
fn pending_and_open_streams_are_bounded() {
    let mut limits = Limits::default();
    (limits.pending, limits.streams) = (2, 3);
    let mut stage = Stage::new(limits);
    for n in 0..2 {
        let (_, _, first) = stage.harness(&format!("p{n}"), n);
        assert_eq!(resets(&stage.deliver(&first[1])), []);
    }
    let (_, _, first) = stage.harness("p2", 2);
    assert_eq!(
        resets(&stage.deliver(&first[1])),
        [("p2".to_owned(), Reason::TooManyValidations)]
    );
    // Nobody decides; the places become free.
    stage.now += Duration::from_secs(10);
    stage.executor.handle_timeout(stage.now);
    let answers = resets(&frames(&mut stage.executor, stage.now));
    assert!(
        answers
            .iter()
            .all(|(_, reason)| *reason == Reason::ValidationTimeout)
    );
    assert_eq!(answers.len(), 2);
    events(&mut stage.executor);
    for n in 0..3 {
        stage.open(&format!("o{n}"), 10 + n);
    }
    let (_, _, first) = stage.harness("o3", 20);
    assert_eq!(
        resets(&stage.deliver(&first[1])),
        [("o3".to_owned(), Reason::TooManyStreams)]
    );
}

#[test]
fn a_forged_reset_ends_one_stream_and_no_other() {
    let mut stage = Stage::new(Limits::default());
    let (mut first, here, there) = stage.open("first", 1);
    let (_, _, second) = stage.open("second", 2);
    stage.deliver(&Transmit::reset("unknown", "because").to_vec());
    assert!(events(&mut stage.executor).is_empty(), "nobody's stream");
    let answer = stage.deliver(&Transmit::reset("second", "because").to_vec());
    assert_eq!(resets(&answer), [], "a reset is not answered");
    let [
        Event::Closed {
            stream,
            reason,
            by_peer: true,
            ..
        },
    ] = &events(&mut stage.executor)[..]
    else {
        panic!("not closed")
    };
    assert_eq!((*stream, reason.as_str()), (second, "because"));
    first
        .send_message(stage.now, here, Bytes::from_static(b"on"))
        .unwrap();
    for frame in frames(&mut first, stage.now) {
        stage.deliver(&frame);
    }
    assert_eq!(
        stage.executor.read_message(stage.now, there).unwrap(),
        &b"on"[..]
    );
    // A false word about a socket stops nothing for good.
    stage.deliver(&Transmit::reset("first", Reason::HarnessDetached.as_str()).to_vec());
    stage
        .executor
        .send_message(stage.now, there, Bytes::from_static(b"back"))
        .unwrap();
    first
        .send_message(stage.now, here, Bytes::from_static(b"here"))
        .unwrap();
    for frame in frames(&mut first, stage.now) {
        for frame in stage.deliver(&frame) {
            first.handle_frame(stage.now, &frame).unwrap();
        }
    }
    assert_eq!(first.read_message(stage.now, here).unwrap(), &b"back"[..]);
}

#[test]
fn false_acknowledgements_do_not_break_the_sender() {
    let mut stage = Stage::new(Limits::default());
    let (mut harness, here, _) = stage.open(STREAM, 1);
    for (ack, bits, credit) in [
        (u32::MAX, u32::MAX, u64::MAX),
        (1000, 0, 0),
        (0, u32::MAX, 1),
    ] {
        let acks = Acks { ack, bits, credit };
        for frame in [
            Transmit::ack(STREAM, acks),
            Transmit::resume(STREAM, acks, u32::MAX),
        ] {
            harness.handle_frame(stage.now, &frame.to_vec()).unwrap();
            stage.deliver(&frame.to_vec());
        }
    }
    harness
        .send_message(stage.now, here, Bytes::from_static(b"x"))
        .unwrap();
    assert!(!frames(&mut harness, stage.now).is_empty());
    assert!(events(&mut harness).is_empty());
}

#[test]
fn a_flipped_bit_is_noticed_wherever_it_is() {
    // In every byte of a frame with a record, one bit; the stream ends or goes on, but nobody ever
    // reads what was not written.
    let mut ends = 0;
    for limits in [true, false] {
        for byte in 0..75_usize {
            let mut stage = Stage::new(Limits::default());
            let acknowledge = limits;
            let mut limits = Limits::default();
            limits.acknowledge = acknowledge;
            let (mut harness, here) = harness_with(limits, &stage.identity, STREAM, stage.now, 3);
            harness.socket_up(stage.now);
            for frame in frames(&mut harness, stage.now) {
                stage.deliver(&frame);
            }
            let Some(Event::Asked { stream: there, .. }) = stage.executor.poll_event() else {
                panic!("not asked")
            };
            stage.executor.admit(stage.now, there);
            for frame in frames(&mut stage.executor, stage.now) {
                harness.handle_frame(stage.now, &frame).unwrap();
            }
            harness
                .send_message(stage.now, here, Bytes::from_static(b"{\"a\":1}"))
                .unwrap();
            let mut frame = frames(&mut harness, stage.now).remove(0);
            let payload = match decode(&frame).unwrap().body {
                Body::Data { payload, .. } => frame.len() - payload.len(),
                other => panic!("{other:?}"),
            };
            let Some(target) = frame.get_mut(byte) else {
                assert!(byte > 65);
                continue;
            };
            *target ^= 1 << (byte % 8);
            stage.deliver(&frame);
            match stage.executor.read_message(stage.now, there) {
                None => {}
                Some(message) => assert_eq!(message, &b"{\"a\":1}"[..], "byte {byte}"),
            }
            let closed = events(&mut stage.executor)
                .into_iter()
                .find_map(|event| match event {
                    Event::Closed { reason, .. } => Some(reason),
                    _ => None,
                });
            if byte >= payload {
                assert_eq!(closed, Some(Reason::DecryptFailed), "byte {byte}");
                ends += 1;
            }
        }
    }
    assert!(ends > 40);
}

#[test]
fn a_meeting_point_that_flips_bits_ends_the_stream() {
    let mut world = World::new(5, FAIR, [Limits::default(), Limits::default()]);
    assert!(world.run(LONG, World::is_open));
    world.tamper = Some(Box::new(|_, from, frame| {
        if from == EXECUTOR && frame.len() > 1000 {
            let at = frame.len() - 100;
            frame[at] ^= 0x10;
        }
    }));
    world.ends[EXECUTOR]
        .to_send
        .push_back(Bytes::from(vec![1; 5000]));
    assert!(world.run(LONG, |world| {
        world.ends.iter().all(|end| end.closed.is_some())
    }));
    assert_eq!(
        world.ends[HARNESS].closed,
        Some((Reason::DecryptFailed, false))
    );
    assert_eq!(
        world.ends[EXECUTOR].closed,
        Some((Reason::DecryptFailed, true))
    );
    assert!(world.ends[HARNESS].received.is_empty());
}

#[test]
fn oversize_things_are_refused_by_name() {
    let mut stage = Stage::new(Limits::default());
    let (mut harness, _, _) = stage.open(STREAM, 1);
    assert!(
        stage
            .executor
            .handle_frame(stage.now, &vec![0; (256 << 10) + 1])
            .is_err()
    );
    assert!(
        events(&mut stage.executor).is_empty(),
        "an executor ignores what is no frame"
    );
    assert!(
        harness
            .handle_frame(stage.now, &vec![0; (256 << 10) + 1])
            .is_err()
    );
    assert!(matches!(
        events(&mut harness)[..],
        [Event::Closed {
            reason: Reason::InvalidFrame,
            ..
        }]
    ));
    let record = vec![0; 61_457];
    let frame = Transmit::data(STREAM, Acks::default(), 1, record.into()).to_vec();
    let answer = stage.deliver(&frame);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), Reason::RecordTooLong)]
    );
    let greeting = vec![0; 70_000];
    let frame = Transmit::handshake("s", Acks::default(), greeting.into()).to_vec();
    assert_eq!(
        resets(&stage.deliver(&frame)),
        [("s".to_owned(), Reason::HandshakeFailed)]
    );
}

#[test]
fn strangers_are_told_why_and_the_dead_stay_dead() {
    let mut stage = Stage::new(Limits::default());
    let (mut harness, here, there) = stage.open(STREAM, 1);
    stage.executor.reset(there, Reason::AuthorizationRevoked);
    frames(&mut stage.executor, stage.now);
    // The reset was lost; whatever the harness says is answered with the same reason.
    harness
        .send_message(stage.now, here, Bytes::from_static(b"x"))
        .unwrap();
    let mut answers = Vec::new();
    for frame in frames(&mut harness, stage.now) {
        answers.extend(stage.deliver(&frame));
    }
    assert_eq!(resets(&answers)[0].1, Reason::AuthorizationRevoked);
    for (frame, answered) in [
        (
            Transmit::data("s", Acks::default(), 0, vec![1].into()),
            true,
        ),
        (Transmit::resume("s", Acks::default(), 7), true),
        (Transmit::heartbeat("s", Acks::default()), true),
        (Transmit::resume("s", Acks::default(), 0), false),
        (Transmit::ack("s", Acks::default()), false),
        (Transmit::reset("s", "x"), false),
    ] {
        let answer = resets(&stage.deliver(&frame.to_vec()));
        let expected = answered.then(|| ("s".to_owned(), Reason::UnknownStream));
        assert_eq!(answer, Vec::from_iter(expected));
    }
    // Nobody takes the answers: they do not pile up.
    for n in 0..10_000 {
        let frame = Transmit::heartbeat(&format!("s{n}"), Acks::default());
        stage
            .executor
            .handle_frame(stage.now, &frame.to_vec())
            .unwrap();
    }
    assert!(stage.executor.buffered_bytes() < 32 << 10);
}

#[test]
fn one_busy_stream_does_not_starve_the_others() {
    let mut stage = Stage::new(Limits::default());
    let (_, _, bulk) = stage.open("bulk", 1);
    let (_, _, quick) = stage.open("quick", 2);
    frames(&mut stage.executor, stage.now);
    stage
        .executor
        .send_message(stage.now, bulk, vec![0; 3 << 20].into())
        .unwrap();
    let first = stage.executor.poll_transmit(stage.now).unwrap().to_vec();
    assert_eq!(decode(&first).unwrap().stream_id, "bulk");
    stage
        .executor
        .send_message(stage.now, quick, Bytes::from_static(b"echo"))
        .unwrap();
    let next = [(); 2].map(|()| stage.executor.poll_transmit(stage.now).unwrap().to_vec());
    let ids = next
        .each_ref()
        .map(|frame| decode(frame).unwrap().stream_id);
    assert!(
        ids.contains(&"quick".into()),
        "at most one record of the other comes first"
    );
    // And a control frame overtakes both.
    stage.deliver_only(&Transmit::heartbeat("nobody", Acks::default()).to_vec());
    let frame = stage.executor.poll_transmit(stage.now).unwrap().to_vec();
    assert!(matches!(decode(&frame).unwrap().body, Body::Reset { .. }));
}

impl Stage {
    fn deliver_only(&mut self, frame: &[u8]) {
        self.executor.handle_frame(self.now, frame).unwrap();
    }
}

#[test]
fn a_million_strange_frames_change_nothing() {
    let mut random = Random::new(42);
    let mut stage = Stage::new(Limits::default());
    let (mut harness, here, there) = stage.open(STREAM, 1);
    // A store of real frames to change and repeat.
    let mut store: Vec<Vec<u8>> = Vec::new();
    for n in 0..40 {
        let (_, _, first) = stage.harness(&format!("s{}", n % 8), 100 + n);
        store.extend(first);
    }
    for size in [1, 20, 300] {
        let text = vec![b'x'; size];
        for (n, id) in [STREAM, "s1", "s2", ""].into_iter().enumerate() {
            let acks = Acks {
                ack: n as u32,
                bits: size as u32,
                credit: 1 << (8 * n),
            };
            let seq = (random.next() % 90) as u32;
            store.push(Transmit::data(id, acks, seq, text.clone().into()).to_vec());
            store.push(Transmit::ack(id, acks).to_vec());
            store.push(Transmit::resume(id, acks, seq).to_vec());
            store.push(Transmit::heartbeat(id, acks).to_vec());
            if id != STREAM {
                store.push(Transmit::reset(id, "r").to_vec());
                store.push(Transmit::reset(id, Reason::HarnessDetached.as_str()).to_vec());
            }
        }
    }
    let mut peak = 0;
    let mut valid = 0_u32;
    let mut reopened = 0_u32;
    let (mut harness_alive, mut there_alive) = (true, true);
    for n in 0..1_000_000_u32 {
        let mut frame = store[random.below(store.len() as u64) as usize].clone();
        for _ in 0..random.below(3) {
            let at = random.below(frame.len() as u64) as usize;
            match random.below(5) {
                0 => frame[at] = random.next() as u8,
                1 => frame[at] ^= 1 << random.below(8),
                2 => frame.truncate(at + 1),
                3 => frame.insert(at, random.next() as u8),
                _ => {
                    let other = &store[random.below(store.len() as u64) as usize];
                    frame.extend_from_slice(&other[..other.len().min(40)]);
                }
            }
        }
        valid += u32::from(stage.executor.handle_frame(stage.now, &frame).is_ok());
        if harness_alive {
            let _ = harness.handle_frame(stage.now, &frame);
        }
        if n % 16 == 0 {
            stage.now += Duration::from_millis(random.below(20));
            stage.executor.handle_timeout(stage.now);
            harness.handle_timeout(stage.now);
        }
        if n % 50_000 == 49_999 {
            stage.executor.socket_lost();
            stage.executor.socket_up(stage.now);
        }
        for event in events(&mut stage.executor) {
            match event {
                Event::Asked { stream, .. } if random.percent(50) => {
                    stage.executor.admit(stage.now, stream);
                    reopened += 1;
                }
                Event::Closed { stream, unread, .. } => {
                    assert!(unread.is_empty(), "nobody has sent a message");
                    there_alive &= stream != there;
                }
                Event::Readable(_) => panic!("nobody has sent a message"),
                _ => {}
            }
        }
        for event in events(&mut harness) {
            match event {
                Event::Closed { stream, unread, .. } => {
                    assert!(unread.is_empty() && stream == here);
                    harness_alive = false;
                }
                Event::Readable(_) => panic!("nobody has sent a message"),
                _ => {}
            }
        }
        while stage.executor.poll_transmit(stage.now).is_some() {}
        while harness.poll_transmit(stage.now).is_some() {}
        peak = peak.max(stage.executor.buffered_bytes() + harness.buffered_bytes());
        assert!(stage.executor.stream_count() <= 128 + 32);
    }
    assert!(valid > 300_000, "{valid} of them were frames");
    assert!(reopened > 10, "{reopened} streams were opened on the way");
    assert!(
        !there_alive && !harness_alive,
        "forged records end the streams they are for"
    );
    assert!(peak < 1 << 20, "{peak} bytes were kept at some time");
}
