//! Slow peers: they hold up themselves, and nobody else.

use std::time::{Duration, Instant};

use exec_server_rendezvous::Config;

use super::support::{Heard, Meeting, PATIENCE, introduce, quick};

#[tokio::test]
async fn a_harness_that_does_not_read_loses_its_stream_and_nobody_else_does() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut slow = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut slow, "slow").await;
    let mut quick = meeting.harness("env-1", "bob-token", 3).await;
    introduce(&mut executor, &mut quick, "quick").await;

    // Far more than anybody keeps for it.
    let mut longest = Duration::ZERO;
    for seq in 0..1000 {
        executor.data("slow", seq, 61_456).await;
        if seq % 10 == 0 {
            let began = Instant::now();
            executor.data("quick", seq, 10).await;
            quick.hears(Heard::Data("quick".to_owned(), seq, 10)).await;
            longest = longest.max(began.elapsed());
        }
    }
    executor.hears_reset("slow", "receive_overflow").await;
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    assert_eq!(meeting.metric("slow_streams_total"), 1);
    // What waited for it is gone.
    meeting.metric_is("backlog_bytes", 0).await;
    while let Some(heard) = slow.hear().await {
        assert!(
            matches!(heard, Heard::Data(..) | Heard::Reset(..)),
            "{heard:?}"
        );
    }
}

#[tokio::test]
async fn an_executor_alone_with_a_harness_waits_for_it() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut harness, "s").await;
    const FRAMES: u32 = 600;
    // Thirty-five megabytes, seven times what may wait, and a reader that is in no hurry.
    let sending = async {
        for seq in 0..FRAMES {
            executor.data("s", seq, 61_456).await;
        }
        executor
    };
    let reading = async {
        for seq in 0..FRAMES {
            harness
                .hears(Heard::Data("s".to_owned(), seq, 61_456))
                .await;
            if seq % 16 == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let (_executor, ()) = tokio::join!(sending, reading);
    assert_eq!(meeting.metric("slow_streams_total"), 0);
}

#[tokio::test]
async fn a_harness_has_to_wait_for_an_executor_that_does_not_read() {
    let mut limits = quick();
    limits.to_executor = 256 << 10;
    let meeting = Meeting::with(Config::default(), limits).await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut harness, "s").await;
    const FRAMES: u32 = 400;
    let sending = async {
        for seq in 0..FRAMES {
            harness.data("s", seq, 61_456).await;
        }
    };
    let checking = async {
        // It stands still when everything on the way is full.
        let mut last = u64::MAX;
        while meeting.metric("frames_total") != last || meeting.metric("frame_waits_total") == 0 {
            last = meeting.metric("frames_total");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        let waiting = meeting.metric("backlog_bytes");
        assert!(waiting < 1 << 20, "{waiting} bytes wait");
        for seq in 0..FRAMES {
            executor
                .hears(Heard::Data("s".to_owned(), seq, 61_456))
                .await;
        }
    };
    let both = async { tokio::join!(sending, checking) };
    tokio::time::timeout(2 * PATIENCE, both).await.unwrap();
}

#[tokio::test]
async fn a_bulk_stream_does_not_delay_the_others() {
    let meeting = Meeting::start().await;
    let mut executor = meeting.executor("env-1", 1).await;
    let mut bulk = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut bulk, "bulk").await;
    let mut echo = meeting.harness("env-1", "bob-token", 3).await;
    introduce(&mut executor, &mut echo, "echo").await;
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
        match executor.hear().await.unwrap() {
            Heard::Data(id, ..) if id == "echo" => {
                echoes += 1;
                between = 0;
                echo.data("echo", echoes, 10).await;
            }
            Heard::Data(..) => {
                between += 1;
                // A few hundred milliseconds' worth at most waits on the way in front of it.
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
