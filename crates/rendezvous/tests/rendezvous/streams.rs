//! Frames between sockets, and notifications when a peer disconnects.

use exec_server_relay::frame::{Acks, Transmit};
use serde_json::json;

use super::support::{FrameSummary, RawSocket, TestServer, key, open_stream};

#[tokio::test]
async fn frames_reach_their_stream_in_order_and_unchanged() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut alice = server.harness("env-1", "alice-token", 2).await;
    let mut bob = server.harness("env-1", "bob-token", 3).await;
    open_stream(&mut executor, &mut alice, "a").await;
    open_stream(&mut executor, &mut bob, "b").await;
    // Small frames, the largest that peers send, and the largest allowed.
    for (seq, size) in (0..).zip([1, 100, 61_456, 200_000, 261_000]) {
        alice.data("a", seq, size).await;
        bob.data("b", seq, size / 2 + 1).await;
        executor.data("a", seq, size).await;
        executor.data("b", seq, size / 2 + 1).await;
        let (a, b) = ("a".to_owned(), "b".to_owned());
        alice.expect(FrameSummary::Data(a.clone(), seq, size)).await;
        bob.expect(FrameSummary::Data(b.clone(), seq, size / 2 + 1))
            .await;
        let mut received = [
            executor.receive().await.unwrap(),
            executor.receive().await.unwrap(),
        ];
        received
            .sort_by_key(|received| matches!(received, FrameSummary::Data(id, ..) if id == "b"));
        let expected = [
            FrameSummary::Data(a, seq, size),
            FrameSummary::Data(b, seq, size / 2 + 1),
        ];
        assert_eq!(received, expected);
    }
    // Frames without data are forwarded too.
    let acks = Acks {
        ack: 5,
        bits: 1,
        credit: 1 << 40,
    };
    alice.send(&Transmit::heartbeat("a", acks)).await;
    executor.expect(FrameSummary::Other("a".to_owned())).await;
    let (_, listed) = server.get("ops-token", "/cloud/environments").await;
    let listed = &listed["environments"][0];
    assert_eq!(
        (&listed["harnesses"], &listed["streams"]),
        (&json!(2), &json!(2))
    );
}

#[tokio::test]
async fn server_answers_ping_with_pong() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    executor.link.outgoing.push_ping();
    executor.link.outgoing.flush().await.unwrap();
    let event = executor.link.incoming.recv_raw().await.unwrap();
    assert_eq!(event, Some(exec_server_transport::RawEvent::Pong));
}

#[tokio::test]
async fn executor_is_notified_when_a_harness_disconnects_and_the_stream_can_resume() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    harness.data("s", 0, 10).await;
    drop(harness);
    // Frames sent before the disconnect are not lost.
    executor
        .expect(FrameSummary::Data("s".to_owned(), 0, 10))
        .await;
    executor.expect_reset("s", "harness_detached").await;
    // The executor's frames get at most one reset in total.
    executor.data("s", 0, 10).await;
    executor.data("s", 1, 10).await;

    // Another key cannot take the stream, even with the same token.
    let mut thief = server.harness("env-1", "alice-token", 7).await;
    thief.resume("s").await;
    thief.expect_reset("s", "duplicate_stream").await;
    thief.expect_end().await;

    let mut harness = server.harness("env-1", "alice-token", 2).await;
    harness.resume("s").await;
    executor.expect(FrameSummary::Resume("s".to_owned())).await;
    executor.data("s", 2, 10).await;
    harness
        .expect(FrameSummary::Data("s".to_owned(), 2, 10))
        .await;

    // A stream that its harness has ended does not stay reserved.
    harness.reset("s", "closed").await;
    drop(harness);
    executor.expect_reset("s", "closed").await;
    let mut next = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut next, "t").await;
}

#[tokio::test]
async fn newer_socket_of_the_same_harness_takes_over_its_stream() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut before = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut before, "s").await;
    // The same key with another token cannot take the stream while its socket is open.
    let mut bob = server.harness("env-1", "bob-token", 2).await;
    bob.resume("s").await;
    bob.expect_reset("s", "duplicate_stream").await;
    // The old socket still looks alive, as after a change of networks.
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    harness.resume("s").await;
    executor.expect(FrameSummary::Resume("s".to_owned())).await;
    before.expect_end().await;
    executor.data("s", 2, 10).await;
    harness
        .expect(FrameSummary::Data("s".to_owned(), 2, 10))
        .await;
    harness.data("s", 3, 10).await;
    executor
        .expect(FrameSummary::Data("s".to_owned(), 3, 10))
        .await;
}

#[tokio::test]
async fn harnesses_are_notified_when_the_executor_disconnects_and_resume_with_its_next_socket() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    drop(executor);
    harness.expect_reset("s", "executor_detached").await;
    // The harness is notified once.
    harness.data("s", 0, 10).await;
    harness.data("s", 1, 10).await;
    server.metric_is("executors", 0).await;
    assert_eq!(server.connect("env-1", "bob-token", 3).await.0, 409);

    let mut executor = server.executor("env-1", 1).await;
    executor.resume("s").await;
    harness.expect(FrameSummary::Resume("s".to_owned())).await;
    harness.data("s", 2, 10).await;
    executor
        .expect(FrameSummary::Data("s".to_owned(), 2, 10))
        .await;
}

#[tokio::test]
async fn executor_that_resumes_before_its_harness_gets_harness_detached_once() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    for _ in 0..3 {
        executor.resume("s").await;
    }
    executor.expect_reset("s", "harness_detached").await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    harness.resume("s").await;
    executor.expect(FrameSummary::Resume("s".to_owned())).await;
}

#[tokio::test]
async fn newer_socket_of_an_executor_replaces_the_older_one() {
    let server = TestServer::start().await;
    let registered = server.register("env-1", 1).await;
    let mut old = RawSocket::open(&registered).await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut old, &mut harness, "s").await;
    let mut new = RawSocket::open(&registered).await;
    harness.expect_reset("s", "executor_detached").await;
    old.expect_end().await;
    new.resume("s").await;
    harness.expect(FrameSummary::Resume("s".to_owned())).await;
    harness.data("s", 0, 10).await;
    new.expect(FrameSummary::Data("s".to_owned(), 0, 10)).await;
    let (status, answer) = server.connect("env-1", "alice-token", 2).await;
    assert_eq!(
        (status, &answer["executor_public_key"]),
        (200, &json!(key(1)))
    );
}
