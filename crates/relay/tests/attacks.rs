//! Attacks by a hostile rendezvous server, a hostile peer or a third party.

#![allow(clippy::unwrap_used, reason = "helper functions of tests, too")]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::frame::{Acks, FrameBody, Transmit, decode};
use exec_server_relay::keys::Authorization;
use exec_server_relay::noise::StaticKeys;
use exec_server_relay::{
    EndReason, Endpoint, EndpointEvent, EndpointLimits, Mode, RelayHarnessConfig, StreamKey,
};
use support::*;

const LONG: Duration = Duration::from_secs(1000);

/// Returns all frames that an endpoint wants to send.
fn frames(endpoint: &mut Endpoint, now: Instant) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| endpoint.poll_transmit(now))
        .map(|t| t.to_vec())
        .collect()
}

fn events(endpoint: &mut Endpoint) -> Vec<EndpointEvent> {
    std::iter::from_fn(|| endpoint.poll_event()).collect()
}

/// Returns the resets among `frames`, each with its stream id.
fn resets(frames: &[Vec<u8>]) -> Vec<(String, EndReason)> {
    frames
        .iter()
        .filter_map(|frame| {
            let frame = decode(frame).unwrap();
            match frame.body {
                FrameBody::Reset { reason } => {
                    Some((frame.stream_id.into_owned(), EndReason::parse(&reason)))
                }
                _ => None,
            }
        })
        .collect()
}

struct AttackedExecutor {
    now: Instant,
    executor: Endpoint,
    identity: StaticKeys,
}

impl AttackedExecutor {
    fn new(limits: EndpointLimits) -> Self {
        let now = epoch();
        let (mut executor, identity) = executor_with(limits, 77);
        executor.socket_up(now);
        Self {
            now,
            executor,
            identity,
        }
    }

    /// Creates a harness, and returns its first frames without delivering them.
    fn harness(&self, stream_id: &str, seed: u64) -> (Endpoint, StreamKey, Vec<Vec<u8>>) {
        let (mut harness, stream) = harness_with(
            EndpointLimits::default(),
            &self.identity,
            stream_id,
            self.now,
            seed,
        );
        harness.socket_up(self.now);
        let first = frames(&mut harness, self.now);
        assert_eq!(first.len(), 2, "resume and handshake");
        (harness, stream, first)
    }

    fn deliver(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let _ = self.executor.handle_frame(self.now, frame);
        frames(&mut self.executor, self.now)
    }

    /// Opens a stream completely, with one message from the harness.
    fn open(&mut self, stream_id: &str, seed: u64) -> (Endpoint, StreamKey, StreamKey) {
        let (mut harness, here, first) = self.harness(stream_id, seed);
        for frame in &first {
            self.deliver(frame);
        }
        let there = events(&mut self.executor)
            .into_iter()
            .find_map(|event| match event {
                EndpointEvent::AdmissionRequested { stream, .. } => Some(stream),
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
fn replayed_handshake_opens_no_stream_and_is_not_decrypted() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut harness, _, first) = target.harness(STREAM, 1);
    target.deliver(&first[1]);
    let [EndpointEvent::AdmissionRequested { stream, .. }] = &events(&mut target.executor)[..]
    else {
        panic!("no admission request")
    };
    let stream = *stream;
    // While pending, it counts as a repetition and requests no second admission.
    target.deliver(&first[1]);
    assert!(events(&mut target.executor).is_empty());
    target.executor.admit(target.now, stream);
    let reply = frames(&mut target.executor, target.now);
    // While open, the same response is sent again, which only the first harness can use.
    let again = target.deliver(&first[1]);
    let payload = |frame: &[u8]| match decode(frame).unwrap().body {
        FrameBody::Handshake { payload } => payload.into_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(payload(&again[0]), payload(&reply[0]));
    assert_eq!(target.executor.stream_count(), 1);
    harness.handle_frame(target.now, &reply[0]).unwrap();
    assert!(matches!(
        events(&mut harness)[..],
        [EndpointEvent::Opened {
            mode: Mode::Reliable,
            ..
        }]
    ));
    // After the stream has ended.
    target.executor.reset(stream, EndReason::ShuttingDown);
    frames(&mut target.executor, target.now);
    let answer = target.deliver(&first[1]);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), EndReason::HandshakeReplayed)]
    );
    // A handshake of another stream that was not seen before cannot be decrypted for this one.
    let (_, _, unseen) = target.harness(STREAM, 2);
    let greeting = payload(&unseen[1]);
    let moved = Transmit::handshake("another", Acks::default(), greeting.into()).to_vec();
    assert_eq!(
        resets(&target.deliver(&moved)),
        [("another".to_owned(), EndReason::HandshakeFailed)]
    );
    assert_eq!(target.executor.stream_count(), 0);
}

#[test]
fn replayed_handshake_times_out_without_confirmation() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (_, _, first) = target.harness(STREAM, 1);
    target.deliver(&first[1]);
    let [EndpointEvent::AdmissionRequested { stream, .. }] = events(&mut target.executor)[..]
    else {
        panic!("no admission request")
    };
    target.executor.admit(target.now, stream);
    frames(&mut target.executor, target.now);
    // Frames that anyone can forge do not keep the stream alive.
    for _ in 0..40 {
        target.now += Duration::from_secs(1);
        target.executor.handle_timeout(target.now);
        target.deliver(&Transmit::heartbeat(STREAM, Acks::default()).to_vec());
    }
    assert_eq!(target.executor.stream_count(), 0);
    assert!(events(&mut target.executor).iter().any(|event| matches!(
        event,
        EndpointEvent::Closed {
            reason: EndReason::HandshakeTimeout,
            ..
        }
    )));
}

#[test]
fn stolen_authorization_is_reported_with_the_key_of_the_thief() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let mut random = entropy(9);
    let thief = StaticKeys::generate(&mut random);
    let config = RelayHarnessConfig {
        environment_id: ENVIRONMENT.into(),
        registration_id: REGISTRATION.into(),
        stream_id: "thief".into(),
        identity: thief.clone(),
        executor: target.identity.public_key().clone(),
        authorization: Authorization::new("stolen").unwrap(),
        limits: EndpointLimits::default(),
    };
    let (mut harness, _) = Endpoint::harness(config, target.now, &mut random).unwrap();
    harness.socket_up(target.now);
    for frame in frames(&mut harness, target.now) {
        target.deliver(&frame);
    }
    let [
        EndpointEvent::AdmissionRequested {
            stream,
            harness: key,
            authorization,
            ..
        },
    ] = &events(&mut target.executor)[..]
    else {
        panic!("no admission request")
    };
    // The registry can see that the authorization was issued for another key.
    assert_eq!(authorization.reveal(), "stolen");
    assert_eq!(key, thief.public_key());
    let stream = *stream;
    target
        .executor
        .refuse(target.now, stream, EndReason::AuthorizationRefused);
    let answer = frames(&mut target.executor, target.now);
    assert_eq!(
        resets(&answer),
        [("thief".to_owned(), EndReason::AuthorizationRefused)]
    );
    for frame in answer {
        harness.handle_frame(target.now, &frame).unwrap();
    }
    let [
        EndpointEvent::Closed {
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
fn rejected_credentials_of_the_executor_are_reported_in_the_handshake() {
    for acknowledge in [true, false] {
        let mut limits = EndpointLimits::default();
        limits.acknowledge = acknowledge;
        let mut target = AttackedExecutor::new(limits);
        let (mut harness, _, first) = target.harness(STREAM, 1);
        for frame in &first {
            target.deliver(frame);
        }
        let [EndpointEvent::AdmissionRequested { stream, .. }] = events(&mut target.executor)[..]
        else {
            panic!("no admission request")
        };
        let refused = EndReason::ExecutorRejected;
        target.executor.refuse(target.now, stream, refused);
        let answer = frames(&mut target.executor, target.now);
        assert_eq!(resets(&answer), [], "the handshake message is the answer");
        let [EndpointEvent::Closed { .. }] = events(&mut target.executor)[..] else {
            panic!("not closed")
        };
        let answered = answer.iter().filter(|frame| {
            let frame = decode(frame).unwrap();
            matches!(&frame.body, FrameBody::Handshake { payload } if payload.len() == 3465)
        });
        assert_eq!(answered.count(), 1);
        for frame in &answer {
            harness.handle_frame(target.now, frame).unwrap();
        }
        let [
            EndpointEvent::Closed {
                reason,
                by_peer: true,
                ..
            },
        ] = &events(&mut harness)[..]
        else {
            panic!("not closed")
        };
        assert_eq!(*reason, EndReason::ExecutorRejected);
        assert!(!reason.is_retryable());
        assert!(frames(&mut harness, target.now).is_empty());
    }
}

#[test]
fn handshake_for_used_stream_id_is_ignored_and_leaves_the_stream_open() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut victim, here, there) = target.open(STREAM, 1);
    let (mut thief, _, first) = target.harness(STREAM, 2);
    for frame in &first {
        let answer = target.deliver(frame);
        assert_eq!(resets(&answer), [], "a reset would reach the victim");
        for frame in answer {
            thief.handle_frame(target.now, &frame).unwrap();
            victim.handle_frame(target.now, &frame).unwrap();
        }
    }
    assert!(events(&mut thief).is_empty());
    assert!(events(&mut target.executor).is_empty());
    victim
        .send_message(target.now, here, Bytes::from_static(b"still me"))
        .unwrap();
    for frame in frames(&mut victim, target.now) {
        target.deliver(&frame);
    }
    assert_eq!(
        target.executor.read_message(target.now, there).unwrap(),
        &b"still me"[..]
    );
}

#[test]
fn handshake_for_another_registration_is_refused() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (_, _, first) = target.harness(STREAM, 1);
    target.executor.set_registration_id("registration-2".into());
    let answer = target.deliver(&first[1]);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), EndReason::HandshakeFailed)]
    );
}

#[test]
fn answer_of_another_executor_is_rejected() {
    let target = AttackedExecutor::new(EndpointLimits::default());
    let (mut harness, _, first) = target.harness(STREAM, 1);
    let (mut other, _) = executor_with(EndpointLimits::default(), 1234);
    other.socket_up(target.now);
    other.handle_frame(target.now, &first[1]).unwrap();
    let answer = frames(&mut other, target.now);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), EndReason::HandshakeFailed)]
    );
    // A made-up answer fails, too.
    let forged = Transmit::handshake(STREAM, Acks::default(), vec![7; 3424].into()).to_vec();
    harness.handle_frame(target.now, &forged).unwrap();
    assert!(matches!(
        events(&mut harness)[..],
        [EndpointEvent::Closed {
            reason: EndReason::HandshakeFailed,
            ..
        }]
    ));
}

#[test]
fn bad_handshakes_cause_a_bounded_number_of_decryptions() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut friend, here, there) = target.open("friend", 1);
    let mut unseen = 0;
    for n in 0..10_000_u32 {
        let mut message = vec![1; 3600];
        message[..4].copy_from_slice(&n.to_be_bytes());
        let frame = Transmit::handshake(&format!("s{n}"), Acks::default(), message.into());
        let answer = target.deliver(&frame.to_vec());
        let [(_, reason)] = &resets(&answer)[..] else {
            panic!("no reset")
        };
        unseen += u32::from(*reason == EndReason::HandshakeCooldown);
    }
    assert_eq!(unseen, 10_000 - 64);
    assert_eq!(target.executor.stream_count(), 1);
    // Existing streams are not affected, and a second later new ones may try again.
    friend
        .send_message(target.now, here, Bytes::from_static(b"hi"))
        .unwrap();
    for frame in frames(&mut friend, target.now) {
        target.deliver(&frame);
    }
    assert_eq!(
        target.executor.read_message(target.now, there).unwrap(),
        &b"hi"[..]
    );
    target.now += Duration::from_secs(1);
    target.open("late", 5);
}

#[test]
fn pending_and_open_streams_are_bounded() {
    let mut limits = EndpointLimits::default();
    (limits.pending, limits.streams) = (2, 3);
    let mut target = AttackedExecutor::new(limits);
    for n in 0..2 {
        let (_, _, first) = target.harness(&format!("p{n}"), n);
        assert_eq!(resets(&target.deliver(&first[1])), []);
    }
    let (_, _, first) = target.harness("p2", 2);
    assert_eq!(
        resets(&target.deliver(&first[1])),
        [("p2".to_owned(), EndReason::TooManyValidations)]
    );
    // No decision is made; the slots become free after the time limit.
    target.now += Duration::from_secs(10);
    target.executor.handle_timeout(target.now);
    let answers = resets(&frames(&mut target.executor, target.now));
    assert!(
        answers
            .iter()
            .all(|(_, reason)| *reason == EndReason::ValidationTimeout)
    );
    assert_eq!(answers.len(), 2);
    events(&mut target.executor);
    for n in 0..3 {
        target.open(&format!("o{n}"), 10 + n);
    }
    let (_, _, first) = target.harness("o3", 20);
    assert_eq!(
        resets(&target.deliver(&first[1])),
        [("o3".to_owned(), EndReason::TooManyStreams)]
    );
}

#[test]
fn forged_reset_ends_only_its_stream() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut first, here, there) = target.open("first", 1);
    let (_, _, second) = target.open("second", 2);
    target.deliver(&Transmit::reset("unknown", "because").to_vec());
    assert!(events(&mut target.executor).is_empty(), "no such stream");
    let answer = target.deliver(&Transmit::reset("second", "because").to_vec());
    assert_eq!(resets(&answer), [], "a reset is not answered");
    let [
        EndpointEvent::Closed {
            stream,
            reason,
            by_peer: true,
            ..
        },
    ] = &events(&mut target.executor)[..]
    else {
        panic!("not closed")
    };
    assert_eq!((*stream, reason.as_str()), (second, "because"));
    first
        .send_message(target.now, here, Bytes::from_static(b"on"))
        .unwrap();
    for frame in frames(&mut first, target.now) {
        target.deliver(&frame);
    }
    assert_eq!(
        target.executor.read_message(target.now, there).unwrap(),
        &b"on"[..]
    );
    // A false report of a lost socket delays a reliable stream only.
    target.deliver(&Transmit::reset("first", EndReason::HarnessDetached.as_str()).to_vec());
    target
        .executor
        .send_message(target.now, there, Bytes::from_static(b"back"))
        .unwrap();
    first
        .send_message(target.now, here, Bytes::from_static(b"here"))
        .unwrap();
    for frame in frames(&mut first, target.now) {
        for frame in target.deliver(&frame) {
            first.handle_frame(target.now, &frame).unwrap();
        }
    }
    assert_eq!(first.read_message(target.now, here).unwrap(), &b"back"[..]);
}

#[test]
fn false_acknowledgements_do_not_break_the_sender() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut harness, here, _) = target.open(STREAM, 1);
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
            harness.handle_frame(target.now, &frame.to_vec()).unwrap();
            target.deliver(&frame.to_vec());
        }
    }
    harness
        .send_message(target.now, here, Bytes::from_static(b"x"))
        .unwrap();
    assert!(!frames(&mut harness, target.now).is_empty());
    assert!(events(&mut harness).is_empty());
}

#[test]
fn flipped_bit_never_changes_a_message() {
    // Flips one bit in every byte of a frame with a record. The stream may end, but the reader
    // never gets a changed message.
    let mut ends = 0;
    for limits in [true, false] {
        for byte in 0..75_usize {
            let mut target = AttackedExecutor::new(EndpointLimits::default());
            let acknowledge = limits;
            let mut limits = EndpointLimits::default();
            limits.acknowledge = acknowledge;
            let (mut harness, here) = harness_with(limits, &target.identity, STREAM, target.now, 3);
            harness.socket_up(target.now);
            for frame in frames(&mut harness, target.now) {
                target.deliver(&frame);
            }
            let Some(EndpointEvent::AdmissionRequested { stream: there, .. }) =
                target.executor.poll_event()
            else {
                panic!("no admission request")
            };
            target.executor.admit(target.now, there);
            for frame in frames(&mut target.executor, target.now) {
                harness.handle_frame(target.now, &frame).unwrap();
            }
            harness
                .send_message(target.now, here, Bytes::from_static(b"{\"a\":1}"))
                .unwrap();
            let mut frame = frames(&mut harness, target.now).remove(0);
            let payload = match decode(&frame).unwrap().body {
                FrameBody::Data { payload, .. } => frame.len() - payload.len(),
                other => panic!("{other:?}"),
            };
            let Some(flipped) = frame.get_mut(byte) else {
                assert!(byte > 65);
                continue;
            };
            *flipped ^= 1 << (byte % 8);
            target.deliver(&frame);
            match target.executor.read_message(target.now, there) {
                None => {}
                Some(message) => assert_eq!(message, &b"{\"a\":1}"[..], "byte {byte}"),
            }
            let closed = events(&mut target.executor)
                .into_iter()
                .find_map(|event| match event {
                    EndpointEvent::Closed { reason, .. } => Some(reason),
                    _ => None,
                });
            if byte >= payload {
                assert_eq!(closed, Some(EndReason::DecryptFailed), "byte {byte}");
                ends += 1;
            }
        }
    }
    assert!(ends > 40);
}

#[test]
fn bit_flips_by_the_rendezvous_server_end_the_stream() {
    let mut simulation = Simulation::new(
        5,
        NO_FAULTS,
        [EndpointLimits::default(), EndpointLimits::default()],
    );
    assert!(simulation.run(LONG, Simulation::is_open));
    simulation.tamper = Some(Box::new(|_, from, frame| {
        if from == EXECUTOR && frame.len() > 1000 {
            let at = frame.len() - 100;
            frame[at] ^= 0x10;
        }
    }));
    simulation.ends[EXECUTOR]
        .to_send
        .push_back(Bytes::from(vec![1; 5000]));
    assert!(simulation.run(LONG, |simulation| {
        simulation.ends.iter().all(|end| end.closed.is_some())
    }));
    assert_eq!(
        simulation.ends[HARNESS].closed,
        Some((EndReason::DecryptFailed, false))
    );
    assert_eq!(
        simulation.ends[EXECUTOR].closed,
        Some((EndReason::DecryptFailed, true))
    );
    assert!(simulation.ends[HARNESS].received.is_empty());
}

#[test]
fn oversized_frames_ids_and_messages_are_rejected_with_their_reason() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut harness, _, _) = target.open(STREAM, 1);
    assert!(
        target
            .executor
            .handle_frame(target.now, &vec![0; (256 << 10) + 1])
            .is_err()
    );
    assert!(
        events(&mut target.executor).is_empty(),
        "an executor ignores an invalid frame"
    );
    assert!(
        harness
            .handle_frame(target.now, &vec![0; (256 << 10) + 1])
            .is_err()
    );
    assert!(matches!(
        events(&mut harness)[..],
        [EndpointEvent::Closed {
            reason: EndReason::InvalidFrame,
            ..
        }]
    ));
    let record = vec![0; 61_457];
    let frame = Transmit::data(STREAM, Acks::default(), 1, record.into()).to_vec();
    let answer = target.deliver(&frame);
    assert_eq!(
        resets(&answer),
        [(STREAM.to_owned(), EndReason::RecordTooLong)]
    );
    let greeting = vec![0; 70_000];
    let frame = Transmit::handshake("s", Acks::default(), greeting.into()).to_vec();
    assert_eq!(
        resets(&target.deliver(&frame)),
        [("s".to_owned(), EndReason::HandshakeFailed)]
    );
}

#[test]
fn frame_for_ended_stream_is_rejected_with_its_reason() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut harness, here, there) = target.open(STREAM, 1);
    target
        .executor
        .reset(there, EndReason::AuthorizationRevoked);
    frames(&mut target.executor, target.now);
    // The reset was lost; every further frame of the harness gets a response with the same reason.
    harness
        .send_message(target.now, here, Bytes::from_static(b"x"))
        .unwrap();
    let mut answers = Vec::new();
    for frame in frames(&mut harness, target.now) {
        answers.extend(target.deliver(&frame));
    }
    assert_eq!(resets(&answers)[0].1, EndReason::AuthorizationRevoked);
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
        let answer = resets(&target.deliver(&frame.to_vec()));
        let expected = answered.then(|| ("s".to_owned(), EndReason::UnknownStream));
        assert_eq!(answer, Vec::from_iter(expected));
    }
    // Resets that are not sent do not accumulate.
    for n in 0..10_000 {
        let frame = Transmit::heartbeat(&format!("s{n}"), Acks::default());
        target
            .executor
            .handle_frame(target.now, &frame.to_vec())
            .unwrap();
    }
    assert!(target.executor.buffered_bytes() < 32 << 10);
}

#[test]
fn busy_stream_does_not_starve_other_streams() {
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (_, _, bulk) = target.open("bulk", 1);
    let (_, _, quick) = target.open("quick", 2);
    frames(&mut target.executor, target.now);
    target
        .executor
        .send_message(target.now, bulk, vec![0; 3 << 20].into())
        .unwrap();
    let first = target.executor.poll_transmit(target.now).unwrap().to_vec();
    assert_eq!(decode(&first).unwrap().stream_id, "bulk");
    target
        .executor
        .send_message(target.now, quick, Bytes::from_static(b"echo"))
        .unwrap();
    let next = [(); 2].map(|()| target.executor.poll_transmit(target.now).unwrap().to_vec());
    let ids = next
        .each_ref()
        .map(|frame| decode(frame).unwrap().stream_id);
    assert!(
        ids.contains(&"quick".into()),
        "at most one record of the other comes first"
    );
    // A control frame is sent before both.
    target.deliver_only(&Transmit::heartbeat("unknown", Acks::default()).to_vec());
    let frame = target.executor.poll_transmit(target.now).unwrap().to_vec();
    assert!(matches!(
        decode(&frame).unwrap().body,
        FrameBody::Reset { .. }
    ));
}

impl AttackedExecutor {
    fn deliver_only(&mut self, frame: &[u8]) {
        self.executor.handle_frame(self.now, frame).unwrap();
    }
}

#[test]
fn million_random_frames_open_nothing_and_use_bounded_memory() {
    let mut random = XorshiftRandom::new(42);
    let mut target = AttackedExecutor::new(EndpointLimits::default());
    let (mut harness, here, there) = target.open(STREAM, 1);
    // Real frames to change and repeat.
    let mut store: Vec<Vec<u8>> = Vec::new();
    for n in 0..40 {
        let (_, _, first) = target.harness(&format!("s{}", n % 8), 100 + n);
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
                store.push(Transmit::reset(id, EndReason::HarnessDetached.as_str()).to_vec());
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
        valid += u32::from(target.executor.handle_frame(target.now, &frame).is_ok());
        if harness_alive {
            let _ = harness.handle_frame(target.now, &frame);
        }
        if n % 16 == 0 {
            target.now += Duration::from_millis(random.below(20));
            target.executor.handle_timeout(target.now);
            harness.handle_timeout(target.now);
        }
        if n % 50_000 == 49_999 {
            target.executor.socket_lost();
            target.executor.socket_up(target.now);
        }
        for event in events(&mut target.executor) {
            match event {
                EndpointEvent::AdmissionRequested { stream, .. } if random.percent(50) => {
                    target.executor.admit(target.now, stream);
                    reopened += 1;
                }
                EndpointEvent::Closed { stream, unread, .. } => {
                    assert!(unread.is_empty(), "no message was sent");
                    there_alive &= stream != there;
                }
                EndpointEvent::Readable(_) => panic!("no message was sent"),
                _ => {}
            }
        }
        for event in events(&mut harness) {
            match event {
                EndpointEvent::Closed { stream, unread, .. } => {
                    assert!(unread.is_empty() && stream == here);
                    harness_alive = false;
                }
                EndpointEvent::Readable(_) => panic!("no message was sent"),
                _ => {}
            }
        }
        while target.executor.poll_transmit(target.now).is_some() {}
        while harness.poll_transmit(target.now).is_some() {}
        peak = peak.max(target.executor.buffered_bytes() + harness.buffered_bytes());
        assert!(target.executor.stream_count() <= 128 + 32);
    }
    assert!(valid > 300_000, "{valid} of the frames were valid");
    assert!(reopened > 10, "{reopened} streams were opened meanwhile");
    assert!(
        !there_alive && !harness_alive,
        "a forged record ends its stream"
    );
    assert!(peak < 1 << 20, "{peak} bytes were buffered at most");
}
