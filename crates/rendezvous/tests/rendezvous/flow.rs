//! Slow peers: they delay their own streams only.

use std::time::{Duration, Instant};

use exec_server_rendezvous::RendezvousConfig;

use super::support::{FrameSummary, TIMEOUT, TestServer, open_stream, quick};

#[tokio::test]
async fn harness_that_does_not_read_loses_only_its_own_stream() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut slow = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut slow, "slow").await;
    let mut quick = server.harness("env-1", "bob-token", 3).await;
    open_stream(&mut executor, &mut quick, "quick").await;

    // Far more than the server queues for one stream.
    let mut longest = Duration::ZERO;
    for seq in 0..1000 {
        executor.data("slow", seq, 61_456).await;
        if seq % 10 == 0 {
            let began = Instant::now();
            executor.data("quick", seq, 10).await;
            quick
                .expect(FrameSummary::Data("quick".to_owned(), seq, 10))
                .await;
            longest = longest.max(began.elapsed());
        }
    }
    executor.expect_reset("slow", "receive_overflow").await;
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    assert_eq!(server.metric("slow_streams_total"), 1);
    // The queue of the ended stream was discarded.
    server.metric_is("backlog_bytes", 0).await;
    while let Some(received) = slow.receive().await {
        assert!(
            matches!(received, FrameSummary::Data(..) | FrameSummary::Reset(..)),
            "{received:?}"
        );
    }
}

#[tokio::test]
async fn executor_with_a_single_harness_waits_for_a_slow_reader() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    const FRAMES: u32 = 600;
    // 35 MB, seven times the queue limit, with a slow reader.
    let sending = async {
        for seq in 0..FRAMES {
            executor.data("s", seq, 61_456).await;
        }
        executor
    };
    let reading = async {
        for seq in 0..FRAMES {
            harness
                .expect(FrameSummary::Data("s".to_owned(), seq, 61_456))
                .await;
            if seq % 16 == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let (_executor, ()) = tokio::join!(sending, reading);
    assert_eq!(server.metric("slow_streams_total"), 0);
}

#[tokio::test]
async fn harness_waits_while_the_executor_does_not_read() {
    let mut limits = quick();
    limits.to_executor = 256 << 10;
    let server = TestServer::with(RendezvousConfig::default(), limits).await;
    let mut executor = server.executor("env-1", 1).await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    const FRAMES: u32 = 400;
    let sending = async {
        for seq in 0..FRAMES {
            harness.data("s", seq, 61_456).await;
        }
    };
    let checking = async {
        // The counter stops when all buffers are full.
        let mut last = u64::MAX;
        while server.metric("frames_total") != last || server.metric("frame_waits_total") == 0 {
            last = server.metric("frames_total");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        let waiting = server.metric("backlog_bytes");
        assert!(waiting < 1 << 20, "{waiting} bytes wait");
        for seq in 0..FRAMES {
            executor
                .expect(FrameSummary::Data("s".to_owned(), seq, 61_456))
                .await;
        }
    };
    let both = async { tokio::join!(sending, checking) };
    tokio::time::timeout(2 * TIMEOUT, both).await.unwrap();
}

#[tokio::test]
async fn bulk_stream_does_not_delay_other_streams() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    let mut bulk = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut bulk, "bulk").await;
    let mut echo = server.harness("env-1", "bob-token", 3).await;
    open_stream(&mut executor, &mut echo, "echo").await;
    let flood = tokio::spawn(async move {
        for seq in 0..2000 {
            bulk.data("bulk", seq, 61_456).await;
        }
        bulk
    });
    let mut echoes = 0;
    echo.data("echo", 0, 10).await;
    let mut between = 0;
    while echoes < 20 {
        match executor.receive().await.unwrap() {
            FrameSummary::Data(id, ..) if id == "echo" => {
                echoes += 1;
                between = 0;
                echo.data("echo", echoes, 10).await;
            }
            FrameSummary::Data(..) => {
                between += 1;
                // At most a few hundred milliseconds of bulk frames are queued before an echo.
                assert!(between < 1000, "an echo has waited for {between} frames");
                if flood.is_finished() {
                    break;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    flood.abort();
    assert!(echoes > 0);
}

#[tokio::test]
async fn frame_above_the_limit_is_answered_with_the_limit() {
    let server = TestServer::start().await;
    let mut executor = server.executor("env-1", 1).await;
    // Sent to its end, as by a peer that does not look for an answer before.
    let large = vec![0; 8 << 20];
    executor.link.outgoing.push_binary([&large[..], &[]]);
    let sent = executor.link.outgoing.flush().await;
    executor.expect_end().await;
    let (code, reason) = executor.link.incoming.close_reason().expect("a reason");
    assert_eq!(code, 1009, "{reason} {sent:?}");
    assert!(reason.contains("exceeds the limit of "), "{reason}");
}
