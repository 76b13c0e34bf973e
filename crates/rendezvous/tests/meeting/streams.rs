//! What passes between the sockets, and what each side hears when the other is gone.

use exec_server_relay::frame::{Acks, Transmit};
use serde_json::json;

use super::support::{Heard, Meeting, Socket, introduce, key};

#[tokio::test]
async fn frames_go_to_their_stream_in_order_and_unchanged() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut alice = meeting.harness("env-1", "alice-token", 2).await;
    let mut bob = meeting.harness("env-1", "bob-token", 3).await;
    introduce(&mut executor, &mut alice, "a").await;
    introduce(&mut executor, &mut bob, "b").await;
    // Small ones, one of the largest that peers send, and the largest there may be.
    for (seq, size) in (0..).zip([1, 100, 61_456, 200_000, 261_000]) {
        alice.data("a", seq, size).await;
        bob.data("b", seq, size / 2 + 1).await;
        executor.data("a", seq, size).await;
        executor.data("b", seq, size / 2 + 1).await;
        let (a, b) = ("a".to_owned(), "b".to_owned());
        alice.hears(Heard::Data(a.clone(), seq, size)).await;
        bob.hears(Heard::Data(b.clone(), seq, size / 2 + 1)).await;
        let mut heard = [
            executor.hear().await.unwrap(),
            executor.hear().await.unwrap(),
        ];
        heard.sort_by_key(|heard| matches!(heard, Heard::Data(id, ..) if id == "b"));
        let expected = [Heard::Data(a, seq, size), Heard::Data(b, seq, size / 2 + 1)];
        assert_eq!(heard, expected);
    }
    // Fields that are none of ours travel too.
    let acks = Acks {
        ack: 5,
        bits: 1,
        credit: 1 << 40,
    };
    alice.send(&Transmit::heartbeat("a", acks)).await;
    executor.hears(Heard::Other("a".to_owned())).await;
    let (_, listed) = meeting.get("ops-token", "/cloud/environments").await;
    let listed = &listed["environments"][0];
    assert_eq!(
        (&listed["harnesses"], &listed["streams"]),
        (&json!(2), &json!(2))
    );
}

#[tokio::test]
async fn pings_are_answered() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    executor.link.outgoing.push_ping();
    executor.link.outgoing.flush().await.unwrap();
    let event = executor.link.incoming.recv_raw().await.unwrap();
    assert_eq!(event, Some(exec_server_transport::RawEvent::Pong));
}

#[tokio::test]
async fn an_executor_hears_that_a_harness_is_gone_and_the_stream_can_go_on() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut harness, "s").await;
    harness.data("s", 0, 10).await;
    drop(harness);
    // What was sent before is not lost.
    executor.hears(Heard::Data("s".to_owned(), 0, 10)).await;
    executor.hears_reset("s", "harness_detached").await;
    // What the executor says meanwhile is answered at most once, and that was it.
    executor.data("s", 0, 10).await;
    executor.data("s", 1, 10).await;

    // Somebody else cannot have the stream, not even with the same token.
    let mut thief = meeting.harness("env-1", "alice-token", 7).await;
    thief.resume("s").await;
    thief.hears_reset("s", "duplicate_stream").await;
    thief.ends().await;

    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    harness.resume("s").await;
    executor.hears(Heard::Resume("s".to_owned())).await;
    executor.data("s", 2, 10).await;
    harness.hears(Heard::Data("s".to_owned(), 2, 10)).await;

    // One that ends its stream before it goes is gone for good.
    harness.reset("s", "closed").await;
    drop(harness);
    executor.hears_reset("s", "closed").await;
    let mut next = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut next, "t").await;
}

#[tokio::test]
async fn a_newer_socket_of_the_same_harness_takes_its_stream_over() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut before = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut before, "s").await;
    // The same keys with another token are somebody else while the socket is there.
    let mut bob = meeting.harness("env-1", "bob-token", 2).await;
    bob.resume("s").await;
    bob.hears_reset("s", "duplicate_stream").await;
    // Its last socket looks alive, as one does after a change of networks.
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    harness.resume("s").await;
    executor.hears(Heard::Resume("s".to_owned())).await;
    before.ends().await;
    executor.data("s", 2, 10).await;
    harness.hears(Heard::Data("s".to_owned(), 2, 10)).await;
    harness.data("s", 3, 10).await;
    executor.hears(Heard::Data("s".to_owned(), 3, 10)).await;
}

#[tokio::test]
async fn harnesses_hear_that_the_executor_is_gone_and_go_on_with_its_next_socket() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut harness, "s").await;
    drop(executor);
    harness.hears_reset("s", "executor_detached").await;
    // Told once.
    harness.data("s", 0, 10).await;
    harness.data("s", 1, 10).await;
    meeting.metric_is("executors", 0).await;
    assert_eq!(meeting.ask("env-1", "bob-token", 3).await.0, 409);

    let mut executor = meeting.executor("env-1", 1).await;
    executor.resume("s").await;
    harness.hears(Heard::Resume("s".to_owned())).await;
    harness.data("s", 2, 10).await;
    executor.hears(Heard::Data("s".to_owned(), 2, 10)).await;
}

#[tokio::test]
async fn an_executor_that_comes_first_hears_that_its_harness_is_not_there_yet() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    for _ in 0..3 {
        executor.resume("s").await;
    }
    executor.hears_reset("s", "harness_detached").await;
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    harness.resume("s").await;
    executor.hears(Heard::Resume("s".to_owned())).await;
}

#[tokio::test]
async fn a_newer_socket_of_an_executor_replaces_the_older() {
    let meeting = Meeting::start().await;
    let registered = meeting.register("env-1", 1).await;
    let mut old = Socket::open(&registered).await;
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut old, &mut harness, "s").await;
    let mut new = Socket::open(&registered).await;
    harness.hears_reset("s", "executor_detached").await;
    old.ends().await;
    new.resume("s").await;
    harness.hears(Heard::Resume("s".to_owned())).await;
    harness.data("s", 0, 10).await;
    new.hears(Heard::Data("s".to_owned(), 0, 10)).await;
    let (status, answer) = meeting.ask("env-1", "alice-token", 2).await;
    assert_eq!(
        (status, &answer["executor_public_key"]),
        (200, &json!(key(1)))
    );
}
