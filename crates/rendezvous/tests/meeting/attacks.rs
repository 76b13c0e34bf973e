//! Peers that mean harm: to the executor, to other harnesses, to the meeting point.

use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::frame::{Acks, Transmit};
use exec_server_rendezvous::Config;
use serde_json::json;

use super::support::{Heard, Meeting, Socket, TOKENS, introduce, quick};

/// An executor, and alice on a stream with it.
async fn meeting() -> (Meeting, Socket, Socket) {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut alice = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut alice, "alice").await;
    (meeting, executor, alice)
}

/// Alice and her executor have noticed nothing.
async fn unharmed(executor: &mut Socket, alice: &mut Socket) {
    alice.data("alice", 9, 10).await;
    executor.hears(Heard::Data("alice".to_owned(), 9, 10)).await;
    executor.data("alice", 9, 10).await;
    alice.hears(Heard::Data("alice".to_owned(), 9, 10)).await;
}

#[tokio::test]
async fn the_stream_of_another_harness_cannot_be_had() {
    let (meeting, mut executor, mut alice) = meeting().await;
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    bob.resume("alice").await;
    bob.hears_reset("alice", "duplicate_stream").await;
    bob.ends().await;
    // Not with a handshake either, which would make a compatible executor reset alice's stream.
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    bob.handshake("alice").await;
    bob.hears_reset("alice", "duplicate_stream").await;
    unharmed(&mut executor, &mut alice).await;
    meeting.metric_is("violations_total", 2).await;
}

#[tokio::test]
async fn a_reset_for_the_stream_of_another_harness_goes_nowhere() {
    let (meeting, mut executor, mut alice) = meeting().await;
    // As the first frame, and after a stream of one's own.
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    bob.reset("alice", "forged").await;
    bob.hears_reset("alice", "unexpected_frame").await;
    bob.ends().await;
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    introduce(&mut executor, &mut bob, "bob").await;
    bob.reset("alice", "forged").await;
    bob.hears_reset("alice", "unexpected_frame").await;
    bob.ends().await;
    executor.hears_reset("bob", "harness_detached").await;
    // Nor can an executor of one environment end streams of another.
    let mut other = meeting.executor("env-2", 4).await;
    other.reset("alice", "forged").await;
    other.data("alice", 0, 1).await;
    other.hears_reset("alice", "harness_detached").await;
    unharmed(&mut executor, &mut alice).await;
}

#[tokio::test]
async fn who_sends_what_is_no_frame_is_dropped_alone() {
    let (meeting, mut executor, mut alice) = meeting().await;
    let frames: [Vec<u8>; 5] = [
        vec![0xff; 20],
        Vec::new(),
        // Version 2, no stream id, no body.
        vec![0x08, 2, 0x12, 1, b's', 0x3a, 0],
        vec![0x08, 1, 0x3a, 0],
        vec![0x08, 1, 0x12, 1, b's'],
    ];
    for frame in frames {
        let mut bob = meeting.harness("env-1", "bob-token", 3).await;
        bob.link.outgoing.push_binary([&frame, &[]]);
        bob.link.outgoing.flush().await.unwrap();
        bob.ends().await;
    }
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    bob.link.outgoing.push_message(2, |out| out.extend(b"{}"));
    bob.link.outgoing.flush().await.unwrap();
    bob.ends().await;
    meeting.metric_is("violations_total", 6).await;
    unharmed(&mut executor, &mut alice).await;
}

#[tokio::test]
async fn oversize_frames_reach_nobody() {
    let (meeting, mut executor, mut alice) = meeting().await;
    for size in [256 << 10, 300_000, 8 << 20] {
        let mut bob = meeting.harness("env-1", "bob-token", 3).await;
        introduce(&mut executor, &mut bob, "bob").await;
        let frame = Transmit::data("bob", Acks::default(), 0, Bytes::from(vec![0; size]));
        bob.link.outgoing.push_binary(frame.parts());
        // It may hang up before all was sent.
        let _ = bob.link.outgoing.flush().await;
        executor.hears_reset("bob", "harness_detached").await;
    }
    // Nor does one from an executor, which is dropped for it.
    let frame = Transmit::data("alice", Acks::default(), 0, Bytes::from(vec![0; 300_000]));
    executor.link.outgoing.push_binary(frame.parts());
    let _ = executor.link.outgoing.flush().await;
    alice.hears_reset("alice", "executor_detached").await;
}

#[tokio::test]
async fn ten_thousand_handshakes_do_not_get_the_executor_to_turn_others_away() {
    let (meeting, mut executor, mut alice) = meeting().await;
    let mut reached = 0;
    for number in 0..5 {
        let mut bob = meeting.harness("env-1", "bob-token", 3).await;
        let stream = format!("bob-{number}");
        bob.resume(&stream).await;
        // As fast as it can.
        let payload = Bytes::from_static(b"garbage");
        let frame = Transmit::handshake(&stream, Acks::default(), payload);
        for _ in 0..2000 {
            bob.link.outgoing.push_binary(frame.parts());
        }
        let _ = bob.link.outgoing.flush().await;
        while bob.hear().await.is_some() {}
        // A compatible executor answers garbage with a reset.
        alice.data("alice", number, 10).await;
        loop {
            match executor.hear().await.unwrap() {
                Heard::Handshake(id) => {
                    reached += 1;
                    executor.reset(&id, "noise_relay_protocol_error").await;
                }
                Heard::Data(id, ..) if id == "alice" => break,
                Heard::Resume(_) | Heard::Reset(..) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    // Eight failures make a compatible executor turn away everybody.
    assert!(
        reached < 8,
        "{reached} of 10000 handshakes reached the executor"
    );
    unharmed(&mut executor, &mut alice).await;
    // Others are still let in.
    let mut carol = meeting.harness("env-1", "alice-token", 5).await;
    introduce(&mut executor, &mut carol, "carol").await;
}

#[tokio::test]
async fn handshakes_wait_for_their_turn() {
    let mut limits = quick();
    limits.handshakes = 2;
    let meeting = Meeting::with(Config::default(), limits).await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut sockets = Vec::new();
    for number in 0..4 {
        let mut socket = meeting.harness("env-1", "alice-token", 2).await;
        socket.handshake(&number.to_string()).await;
        sockets.push(socket);
    }
    // Two come, and no more before one of them is answered.
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(executor.hear().await.unwrap());
    }
    let early = tokio::time::timeout(Duration::from_millis(300), executor.hear()).await;
    assert!(early.is_err(), "{early:?}");
    for answered in 0..4 {
        let Heard::Handshake(id) = waiting.remove(0) else {
            panic!("a handshake");
        };
        executor.handshake(&id).await;
        let number: usize = id.parse().unwrap();
        sockets[number].hears(Heard::Handshake(id)).await;
        if answered < 2 {
            waiting.push(executor.hear().await.unwrap());
        }
    }
    assert!(waiting.is_empty(), "{waiting:?}");
}

#[tokio::test]
async fn a_revoked_harness_is_out_within_a_second() {
    let (meeting, mut executor, mut alice) = meeting().await;
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    introduce(&mut executor, &mut bob, "bob").await;
    let revoke = async |token: &str, body| meeting.post(token, "/cloud/revoke", body).await;
    let (status, _) = revoke("alice-token", json!({"harness": "bob"})).await;
    assert_eq!(status, 403);

    // By its token.
    let began = Instant::now();
    let (status, answer) = revoke("ops-token", json!({"harness": "token:bob"})).await;
    assert_eq!((status, &answer["sockets_ended"]), (200, &json!(1)));
    bob.hears_reset("bob", "authorization_revoked").await;
    bob.ends().await;
    executor.hears_reset("bob", "authorization_revoked").await;
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(meeting.ask("env-1", "bob-token", 3).await.0, 403);
    unharmed(&mut executor, &mut alice).await;
    let (_, listed) = meeting.get("ops-token", "/cloud/revocations").await;
    assert_eq!(listed["revocations"][0]["harness"], "token:bob");

    // Let in again; then by its key, in one environment, with an address that is still good.
    let permit = json!({"harness": "bob"});
    let (_, permitted) = meeting.post("ops-token", "/cloud/permit", permit).await;
    assert_eq!(permitted, json!({"permitted": true}));
    let (_, asked) = meeting.ask("env-1", "bob-token", 3).await;
    let mut bob = Socket::open(&asked).await;
    introduce(&mut executor, &mut bob, "bob-2").await;
    let key = json!({"harness_public_key": super::support::key(3), "environment_id": "env-1"});
    assert_eq!(revoke("ops-token", key).await.0, 200);
    bob.hears_reset("bob-2", "authorization_revoked").await;
    executor.hears_reset("bob-2", "authorization_revoked").await;
    assert!(
        Socket::try_open(asked["url"].as_str().unwrap())
            .await
            .is_err()
    );
    assert_eq!(meeting.ask("env-1", "bob-token", 3).await.0, 403);
    // Another key of the same person is somebody else.
    assert_eq!(meeting.ask("env-1", "bob-token", 4).await.0, 200);
    unharmed(&mut executor, &mut alice).await;
    for bad in [
        json!({}),
        json!({"harness": "x:y"}),
        json!({"harness": "key:12"}),
    ] {
        assert_eq!(revoke("ops-token", bad).await.0, 400);
    }
}

#[tokio::test]
async fn who_loses_a_token_is_out_at_once() {
    let (meeting, mut executor, mut alice) = meeting().await;
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    introduce(&mut executor, &mut bob, "bob").await;
    let without = TOKENS.replace("bob harness", "#");
    let tokens = without.parse().unwrap();
    meeting.rendezvous.set_tokens(tokens).await;
    bob.hears_reset("bob", "authorization_revoked").await;
    executor.hears_reset("bob", "authorization_revoked").await;
    assert_eq!(meeting.ask("env-1", "bob-token", 3).await.0, 401);
    unharmed(&mut executor, &mut alice).await;
    // An executor too.
    let without = TOKENS.replace("executor executor", "#");
    meeting
        .rendezvous
        .set_tokens(without.parse().unwrap())
        .await;
    alice.hears_reset("alice", "authorization_revoked").await;
    while executor.hear().await.is_some() {}
}

#[tokio::test]
async fn one_token_has_so_many_sockets() {
    let mut limits = quick();
    limits.harness_sockets = 2;
    let meeting = Meeting::with(Config::default(), limits).await;
    let _executor = meeting.executor("env-1", 1).await;
    let _first = meeting.harness("env-1", "alice-token", 2).await;
    let second = meeting.harness("env-1", "alice-token", 3).await;
    let (_, asked) = meeting.ask("env-1", "alice-token", 4).await;
    let refused = Socket::try_open(asked["url"].as_str().unwrap()).await;
    let error = refused.err().unwrap().to_string();
    assert!(
        error.contains("429") && error.contains("limit of 2"),
        "{error}"
    );
    let _bob = meeting.harness("env-1", "bob-token", 5).await;
    drop(second);
    meeting.metric_is("harnesses", 2).await;
    let _third = Socket::open(&asked).await;
}
