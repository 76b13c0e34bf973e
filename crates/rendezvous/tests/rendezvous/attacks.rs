//! Attacks by a peer on the executor, on other harnesses and on the rendezvous server.

use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_relay::frame::{Acks, Transmit};
use exec_server_rendezvous::RendezvousConfig;
use serde_json::json;

use super::support::{FrameSummary, RawSocket, TOKENS, TestServer, open_stream, quick};

/// Starts an executor, and a stream between it and the harness of alice.
async fn server() -> (TestServer, RawSocket, RawSocket) {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut alice = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut alice, "alice").await;
    (server, executor, alice)
}

/// Checks that the stream of alice still works.
async fn assert_stream_works(executor: &mut RawSocket, alice: &mut RawSocket) {
    alice.data("alice", 9, 10).await;
    executor
        .expect(FrameSummary::Data("alice".to_owned(), 9, 10))
        .await;
    executor.data("alice", 9, 10).await;
    alice
        .expect(FrameSummary::Data("alice".to_owned(), 9, 10))
        .await;
}

#[tokio::test]
async fn resume_and_handshake_for_the_stream_of_another_harness_are_refused() {
    let (server, mut executor, mut alice) = server().await;
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    bob.resume("alice").await;
    bob.expect_reset("alice", "duplicate_stream").await;
    bob.expect_end().await;
    // A handshake must not pass either: a compatible executor would reset alice's stream.
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    bob.handshake("alice").await;
    bob.expect_reset("alice", "duplicate_stream").await;
    assert_stream_works(&mut executor, &mut alice).await;
    server.metric_is("violations_total", 2).await;
}

#[tokio::test]
async fn reset_for_the_stream_of_another_harness_is_refused() {
    let (server, mut executor, mut alice) = server().await;
    // Sends the frame as the first frame of a socket, and after a stream of the same socket.
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    bob.reset("alice", "forged").await;
    bob.expect_reset("alice", "unexpected_frame").await;
    bob.expect_end().await;
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    open_stream(&mut executor, &mut bob, "bob").await;
    bob.reset("alice", "forged").await;
    bob.expect_reset("alice", "unexpected_frame").await;
    bob.expect_end().await;
    executor.expect_reset("bob", "harness_detached").await;
    // An executor of one environment cannot end streams of another.
    let mut other = server.executor("env-2", 4).await;
    other.reset("alice", "forged").await;
    other.data("alice", 0, 1).await;
    other.expect_reset("alice", "harness_detached").await;
    assert_stream_works(&mut executor, &mut alice).await;
}

#[tokio::test]
async fn invalid_frame_disconnects_only_its_sender() {
    let (server, mut executor, mut alice) = server().await;
    let frames: [Vec<u8>; 5] = [
        vec![0xff; 20],
        Vec::new(),
        // Version 2, no stream id, no body.
        vec![0x08, 2, 0x12, 1, b's', 0x3a, 0],
        vec![0x08, 1, 0x3a, 0],
        vec![0x08, 1, 0x12, 1, b's'],
    ];
    for frame in frames {
        let mut bob = server.harness("env-1", "bob-token", 3).await;
        bob.link.outgoing.push_binary([&frame, &[]]);
        bob.link.outgoing.flush().await.unwrap();
        bob.expect_end().await;
    }
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    bob.link.outgoing.push_message(2, |out| out.extend(b"{}"));
    bob.link.outgoing.flush().await.unwrap();
    bob.expect_end().await;
    server.metric_is("violations_total", 6).await;
    assert_stream_works(&mut executor, &mut alice).await;
}

#[tokio::test]
async fn oversize_frame_is_not_forwarded_and_disconnects_its_sender() {
    let (server, mut executor, mut alice) = server().await;
    for size in [256 << 10, 300_000, 8 << 20] {
        let mut bob = server.harness("env-1", "bob-token", 3).await;
        open_stream(&mut executor, &mut bob, "bob").await;
        let frame = Transmit::data("bob", Acks::default(), 0, Bytes::from(vec![0; size]));
        bob.link.outgoing.push_binary(frame.parts());
        // The server may close the connection before everything was sent.
        let _ = bob.link.outgoing.flush().await;
        executor.expect_reset("bob", "harness_detached").await;
    }
    // An executor is disconnected for an oversize frame too.
    let frame = Transmit::data("alice", Acks::default(), 0, Bytes::from(vec![0; 300_000]));
    executor.link.outgoing.push_binary(frame.parts());
    let _ = executor.link.outgoing.flush().await;
    alice.expect_reset("alice", "executor_detached").await;
}

#[tokio::test]
async fn ten_thousand_handshakes_of_one_token_do_not_lock_out_other_tokens() {
    let (server, mut executor, mut alice) = server().await;
    let mut reached = 0;
    for number in 0..5 {
        let mut bob = server.harness("env-1", "bob-token", 3).await;
        let stream = format!("bob-{number}");
        bob.resume(&stream).await;
        // Sends handshakes as fast as possible.
        let payload = Bytes::from_static(b"garbage");
        let frame = Transmit::handshake(&stream, Acks::default(), payload);
        for _ in 0..2000 {
            bob.link.outgoing.push_binary(frame.parts());
        }
        let _ = bob.link.outgoing.flush().await;
        while bob.receive().await.is_some() {}
        // A compatible executor answers garbage with a reset.
        alice.data("alice", number, 10).await;
        loop {
            match executor.receive().await.unwrap() {
                FrameSummary::Handshake(id) => {
                    reached += 1;
                    executor.reset(&id, "noise_relay_protocol_error").await;
                }
                FrameSummary::Data(id, ..) if id == "alice" => break,
                FrameSummary::Resume(_) | FrameSummary::Reset(..) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    // After eight failures a compatible executor would refuse all harnesses.
    assert!(
        reached < 8,
        "{reached} of 10000 handshakes reached the executor"
    );
    assert_stream_works(&mut executor, &mut alice).await;
    // Other tokens are still accepted.
    let mut carol = server.harness("env-1", "alice-token", 5).await;
    open_stream(&mut executor, &mut carol, "carol").await;
}

#[tokio::test]
async fn handshakes_beyond_the_limit_wait_until_one_is_answered() {
    let mut limits = quick();
    limits.handshakes = 2;
    let server = TestServer::with(RendezvousConfig::default(), limits).await;
    let mut executor = server.executor("env-1", 1).await;
    let mut sockets = Vec::new();
    for number in 0..4 {
        let mut socket = server.harness("env-1", "alice-token", 2).await;
        socket.handshake(&number.to_string()).await;
        sockets.push(socket);
    }
    // Two handshakes arrive, and no more until one of them gets a response.
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(executor.receive().await.unwrap());
    }
    let early = tokio::time::timeout(Duration::from_millis(300), executor.receive()).await;
    assert!(early.is_err(), "{early:?}");
    for answered in 0..4 {
        let FrameSummary::Handshake(id) = waiting.remove(0) else {
            panic!("a handshake");
        };
        executor.handshake(&id).await;
        let number: usize = id.parse().unwrap();
        sockets[number].expect(FrameSummary::Handshake(id)).await;
        if answered < 2 {
            waiting.push(executor.receive().await.unwrap());
        }
    }
    assert!(waiting.is_empty(), "{waiting:?}");
}

#[tokio::test]
async fn revoked_harness_is_disconnected_within_a_second() {
    let (server, mut executor, mut alice) = server().await;
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    open_stream(&mut executor, &mut bob, "bob").await;
    let revoke = async |token: &str, body| server.post(token, "/cloud/revoke", body).await;
    let (status, _) = revoke("alice-token", json!({"harness": "bob"})).await;
    assert_eq!(status, 403);

    // Revoked by token.
    let began = Instant::now();
    let (status, answer) = revoke("ops-token", json!({"harness": "token:bob"})).await;
    assert_eq!((status, &answer["sockets_ended"]), (200, &json!(1)));
    bob.expect_reset("bob", "authorization_revoked").await;
    bob.expect_end().await;
    executor.expect_reset("bob", "authorization_revoked").await;
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(server.connect("env-1", "bob-token", 3).await.0, 403);
    assert_stream_works(&mut executor, &mut alice).await;
    let (_, listed) = server.get("ops-token", "/cloud/revocations").await;
    assert_eq!(listed["revocations"][0]["harness"], "token:bob");

    // Permitted again, then revoked by key in one environment, with a URL that has not expired.
    let permit = json!({"harness": "bob"});
    let (_, permitted) = server.post("ops-token", "/cloud/permit", permit).await;
    assert_eq!(permitted, json!({"permitted": true}));
    let (_, asked) = server.connect("env-1", "bob-token", 3).await;
    let mut bob = RawSocket::open(&asked).await;
    open_stream(&mut executor, &mut bob, "bob-2").await;
    let key = json!({"harness_public_key": super::support::key(3), "environment_id": "env-1"});
    assert_eq!(revoke("ops-token", key).await.0, 200);
    bob.expect_reset("bob-2", "authorization_revoked").await;
    executor
        .expect_reset("bob-2", "authorization_revoked")
        .await;
    assert!(
        RawSocket::try_open(asked["url"].as_str().unwrap())
            .await
            .is_err()
    );
    assert_eq!(server.connect("env-1", "bob-token", 3).await.0, 403);
    // Another key with the same token is not revoked.
    assert_eq!(server.connect("env-1", "bob-token", 4).await.0, 200);
    assert_stream_works(&mut executor, &mut alice).await;
    for bad in [
        json!({}),
        json!({"harness": "x:y"}),
        json!({"harness": "key:12"}),
    ] {
        assert_eq!(revoke("ops-token", bad).await.0, 400);
    }
}

#[tokio::test]
async fn removed_token_disconnects_its_harness_and_executor() {
    let (server, mut executor, mut alice) = server().await;
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    open_stream(&mut executor, &mut bob, "bob").await;
    let without = TOKENS.replace("bob harness", "#");
    let tokens = without.parse().unwrap();
    server.rendezvous.set_tokens(tokens).await;
    bob.expect_reset("bob", "authorization_revoked").await;
    executor.expect_reset("bob", "authorization_revoked").await;
    assert_eq!(server.connect("env-1", "bob-token", 3).await.0, 401);
    assert_stream_works(&mut executor, &mut alice).await;
    // Executors are disconnected too.
    let without = TOKENS.replace("executor executor", "#");
    server.rendezvous.set_tokens(without.parse().unwrap()).await;
    alice.expect_reset("alice", "authorization_revoked").await;
    while executor.receive().await.is_some() {}
}

#[tokio::test]
async fn harness_sockets_of_one_token_are_limited() {
    let mut limits = quick();
    limits.harness_sockets = 2;
    let server = TestServer::with(RendezvousConfig::default(), limits).await;
    let _executor = server.executor("env-1", 1).await;
    let _first = server.harness("env-1", "alice-token", 2).await;
    let second = server.harness("env-1", "alice-token", 3).await;
    let (_, asked) = server.connect("env-1", "alice-token", 4).await;
    let refused = RawSocket::try_open(asked["url"].as_str().unwrap()).await;
    let error = refused.err().unwrap().to_string();
    assert!(
        error.contains("429") && error.contains("limit of 2"),
        "{error}"
    );
    let _bob = server.harness("env-1", "bob-token", 5).await;
    drop(second);
    server.metric_is("harnesses", 2).await;
    let _third = RawSocket::open(&asked).await;
}
