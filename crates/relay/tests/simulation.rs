//! What both modes promise, told as stories with seeds: a failure names its seed.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod support;

use std::time::Duration;

use bytes::Bytes;
use exec_server_relay::{Limits, Mode, Reason};
use support::*;

const MINUTES: Duration = Duration::from_secs(30 * 60);

fn small() -> Limits {
    let mut limits = Limits::default();
    limits.send_bytes = 256 << 10;
    limits.receive_bytes = 512 << 10;
    // In a storm a handshake takes as long as it takes.
    limits.handshake = Duration::from_secs(60);
    limits.confirmation = Duration::from_secs(60);
    limits.linger = Duration::from_secs(120);
    limits
}

fn compatible() -> Limits {
    let mut limits = small();
    limits.acknowledge = false;
    limits
}

/// Sends messages both ways and checks that each arrives once, in order.
fn exactly_once(seed: u64, world: &mut World, count: usize, max: u64) {
    let mut random = Random::new(seed + 1000);
    let sent = [HARNESS, EXECUTOR].map(|_| messages(&mut random, count, max));
    for (end, sent) in world.ends.iter_mut().zip(&sent) {
        end.to_send = sent.clone();
    }
    let done = world.run(MINUTES, |world| {
        world
            .ends
            .iter()
            .all(|end| end.received.len() >= count || end.closed.is_some())
    });
    for at in [HARNESS, EXECUTOR] {
        assert_eq!(world.ends[at].closed, None, "seed {seed}: end {at} closed");
    }
    assert!(done, "seed {seed}: not all arrived");
    for at in [HARNESS, EXECUTOR] {
        let (received, sent) = (&world.ends[at].received, &sent[1 - at]);
        assert!(
            received.iter().eq(sent),
            "seed {seed}: end {at} got something else"
        );
        // Queue, one window, what waits for a gap, and what is being put together.
        let bound = (256 << 10) + max as usize + 2 * 64 * 61_456 + (512 << 10) + max as usize;
        assert!(
            world.ends[at].peak < bound,
            "seed {seed}: {} bytes",
            world.ends[at].peak
        );
    }
}

fn storm() -> Weather {
    Weather {
        loss: 30,
        duplication: 15,
        late: 40,
        lateness: Duration::from_millis(400),
        ..FAIR
    }
}

#[test]
fn nothing_is_lost_in_a_storm() {
    for seed in 0..40 {
        let mut world = World::new(seed, storm(), [small(), small()]);
        exactly_once(seed, &mut world, 60, 100_000);
        assert_eq!(world.ends[HARNESS].mode, Some(Mode::Reliable));
    }
}

#[test]
fn frames_reordered_beyond_the_window_only_cost_time() {
    for seed in 0..10 {
        let weather = Weather {
            late: 10,
            lateness: Duration::from_secs(2),
            ..FAIR
        };
        let mut world = World::new(seed, weather, [small(), small()]);
        exactly_once(seed, &mut world, 400, 60_000);
    }
}

#[test]
fn a_socket_may_die_at_every_frame() {
    // Without loss, so that the count of frames says where in the story it dies.
    let mut cuts = 0;
    for at in [HARNESS, EXECUTOR] {
        for notices in [true, false] {
            for frame in 3.. {
                let weather = Weather { notices, ..FAIR };
                let mut world = World::new(frame, weather, [small(), small()]);
                world.cut_at = Some((frame, at));
                exactly_once(frame, &mut world, 16, 300_000);
                if world.cut_at.is_some() {
                    break;
                }
                cuts += 1;
            }
        }
    }
    assert!(cuts > 100, "only {cuts} cuts");
}

#[test]
fn a_socket_that_dies_before_the_sign_ends_the_stream_before_anything_was_said() {
    for at in [HARNESS, EXECUTOR] {
        for frame in [1, 2] {
            let mut world = World::new(frame, FAIR, [small(), small()]);
            world.ends[HARNESS]
                .to_send
                .push_back(Bytes::from_static(b"hello"));
            world.cut_at = Some((frame, at));
            assert!(world.run(MINUTES, |world| world.ends[HARNESS].closed.is_some()));
            let (reason, _) = world.ends[HARNESS].closed.clone().unwrap();
            assert!(reason.is_retryable(), "{reason}");
            assert_eq!(world.ends[EXECUTOR].received.len(), 0);
        }
    }
}

#[test]
fn sockets_may_die_all_the_time_in_a_storm() {
    for seed in 0..30 {
        let mut weather = storm();
        weather.notices = seed % 2 == 0;
        let mut world = World::new(seed, weather, [small(), small()]);
        assert!(world.run(MINUTES, World::is_open), "seed {seed}");
        let mut random = Random::new(seed);
        let sent = [HARNESS, EXECUTOR].map(|_| messages(&mut random, 60, 150_000));
        for (end, sent) in world.ends.iter_mut().zip(&sent) {
            end.to_send = sent.clone();
        }
        let mut cuts = 0;
        while world
            .ends
            .iter()
            .any(|end| end.received.len() < 60 && end.closed.is_none())
        {
            assert!(world.elapsed() < MINUTES, "seed {seed}: not all arrived");
            if random.below(12) == 0 && cuts < 40 {
                cuts += 1;
                world.cut(random.below(2) as usize);
            }
            world.step();
        }
        for at in [HARNESS, EXECUTOR] {
            assert_eq!(world.ends[at].closed, None, "seed {seed}");
            assert!(
                world.ends[at].received.iter().eq(&sent[1 - at]),
                "seed {seed}"
            );
        }
        assert!(cuts > 5, "seed {seed}: {cuts} cuts");
    }
}

#[test]
fn a_cut_socket_costs_a_round_trip_and_no_handshake() {
    let mut world = World::new(1, FAIR, [small(), small()]);
    assert!(world.run(MINUTES, World::is_open));
    world.outage = Duration::ZERO;
    world.cut(HARNESS);
    world.ends[HARNESS]
        .to_send
        .push_back(Bytes::from_static(b"still there?"));
    let before = world.now;
    assert!(world.run(MINUTES, |world| !world.ends[EXECUTOR].received.is_empty()));
    let outage = world.now - before;
    assert!(
        outage < Duration::from_millis(250),
        "{outage:?}, of which up to 200 without a socket"
    );
}

#[test]
fn a_slow_reader_holds_back_its_sender() {
    let mut world = World::new(2, FAIR, [small(), small()]);
    assert!(world.run(MINUTES, World::is_open));
    world.ends[EXECUTOR].reads = 0;
    let message = Bytes::from(vec![7; 10_000]);
    world.ends[HARNESS].to_send = std::iter::repeat_n(message, 1000).collect();
    world.run(Duration::from_secs(30), |_| false);
    assert!(
        world.ends[EXECUTOR].peak < (512 << 10) + 100_000,
        "{}",
        world.ends[EXECUTOR].peak
    );
    assert!(
        world.ends[HARNESS].to_send.len() > 800,
        "the rest waits with the application"
    );
    assert_eq!(world.ends[EXECUTOR].closed, None);
    let idle = world.ends[HARNESS].transmitted;
    world.run(Duration::from_secs(20), |_| false);
    assert!(
        world.ends[HARNESS].transmitted - idle < 30,
        "waiting is quiet"
    );
    world.ends[EXECUTOR].reads = usize::MAX;
    assert!(world.run(MINUTES, |world| world.ends[EXECUTOR].received.len() == 1000));
}

#[test]
fn a_lost_grant_does_not_stop_the_stream() {
    for seed in 0..10 {
        let weather = Weather { loss: 50, ..FAIR };
        let mut limits = small();
        limits.receive_bytes = 16 << 10;
        let mut world = World::new(seed, weather, [limits.clone(), limits]);
        world.ends[EXECUTOR].reads = 1;
        exactly_once(seed, &mut world, 100, 8_000);
    }
}

#[test]
fn a_message_longer_than_every_buffer_arrives() {
    let mut world = World::new(3, FAIR, [small(), small()]);
    let message = Bytes::from(vec![9; 20 << 20]);
    world.ends[HARNESS].to_send.push_back(message.clone());
    assert!(world.run(MINUTES, |world| !world.ends[EXECUTOR].received.is_empty()));
    assert_eq!(world.ends[EXECUTOR].received[0], message);
}

#[test]
fn an_idle_stream_stays_and_a_vanished_peer_is_noticed() {
    let mut world = World::new(4, FAIR, [small(), small()]);
    assert!(world.run(MINUTES, World::is_open));
    world.ends[HARNESS]
        .to_send
        .push_back(Bytes::from_static(b"hello"));
    world.run(Duration::from_secs(600), |_| false);
    assert!(world.ends.iter().all(|end| end.closed.is_none()));
    let quiet = world.ends[HARNESS].transmitted;
    world.run(Duration::from_secs(100), |_| false);
    assert!(
        (9..12).contains(&(world.ends[HARNESS].transmitted - quiet)),
        "one heartbeat in ten seconds"
    );
    world.weather.loss = 100;
    let before = world.now;
    assert!(world.run(MINUTES, |world| {
        world.ends.iter().all(|end| end.closed.is_some())
    }));
    assert!(world.now - before <= Duration::from_secs(121));
    for end in &world.ends {
        assert_eq!(end.closed, Some((Reason::PeerTimeout, false)));
    }
}

#[test]
fn closing_delivers_everything_first() {
    for (seed, limits) in [(5, small()), (6, compatible())] {
        let weather = if seed == 5 { storm() } else { FAIR };
        let mut world = World::new(seed, weather, [small(), limits]);
        assert!(world.run(MINUTES, World::is_open));
        // As much as the queue takes, and then no more.
        let sent: Vec<_> = (0..20).map(|n| Bytes::from(vec![n; 9_000])).collect();
        world.ends[HARNESS].to_send = sent.clone().into();
        world.step();
        let (now, stream) = (world.now, world.ends[HARNESS].stream.unwrap());
        world.ends[HARNESS].endpoint.close(now, stream);
        let refused = world.ends[HARNESS]
            .endpoint
            .send_message(now, stream, sent[0].clone());
        assert!(refused.is_err());
        assert!(world.run(MINUTES, |world| world.ends[HARNESS].closed.is_some()));
        assert_eq!(world.ends[HARNESS].closed, Some((Reason::Closed, false)));
        if seed == 6 {
            assert!(world.run(MINUTES, |world| world.ends[EXECUTOR].closed.is_some()));
            assert_eq!(world.ends[EXECUTOR].closed, Some((Reason::Closed, true)));
        }
        assert_eq!(world.ends[EXECUTOR].received, sent, "seed {seed}");
    }
}

// The other mode.

#[test]
fn without_the_sign_the_wire_is_that_of_compatible_peers() {
    for limits in [[compatible(), small()], [small(), compatible()]] {
        let mut world = World::new(7, FAIR, limits.clone());
        let signs = limits[HARNESS].acknowledge;
        world.tamper = Some(Box::new(move |_, from, frame| {
            let frame = exec_server_relay::frame::decode(frame).unwrap();
            use exec_server_relay::frame::Body;
            let silent = frame.acks == Default::default();
            assert!(matches!(
                frame.body,
                Body::Data { .. } | Body::Resume { next_seq: 0 } | Body::Handshake { .. }
            ));
            let is_first = matches!(frame.body, Body::Resume { .. } | Body::Handshake { .. });
            assert!(silent || (signs && from == HARNESS && is_first));
        }));
        exactly_once(7, &mut world, 50, 100_000);
        assert_eq!(
            world.ends.each_ref().map(|end| end.mode),
            [Some(Mode::Compatible); 2]
        );
        assert!(
            world.elapsed() < Duration::from_secs(2),
            "nothing waits for an answer"
        );
        // Nothing is kept, and nobody sends a heartbeat.
        assert_eq!(world.ends[HARNESS].endpoint.buffered_bytes(), 0);
        let before = world.ends[HARNESS].transmitted + world.ends[EXECUTOR].transmitted;
        world.run(Duration::from_secs(600), |_| false);
        assert_eq!(
            world.ends[HARNESS].transmitted + world.ends[EXECUTOR].transmitted,
            before
        );
    }
}

#[test]
fn compatible_streams_endure_duplicates_and_reordering_within_the_window() {
    for seed in 0..20 {
        let weather = Weather {
            duplication: 20,
            late: 30,
            lateness: Duration::from_millis(3),
            ..FAIR
        };
        let mut world = World::new(seed, FAIR, [compatible(), small()]);
        assert!(world.run(MINUTES, World::is_open));
        world.weather = weather;
        // Paced by short messages: at most as many records as the window under way.
        let sent: Vec<_> = (0..200_u32)
            .map(|n| Bytes::from(n.to_be_bytes().to_vec()))
            .collect();
        for message in &sent {
            world.ends[HARNESS].to_send.push_back(message.clone());
            world.step();
        }
        assert!(
            world.run(MINUTES, |world| world.ends[EXECUTOR].received.len() == 200),
            "seed {seed}"
        );
        assert_eq!(world.ends[EXECUTOR].received, sent, "seed {seed}");
    }
}

#[test]
fn a_compatible_stream_that_lost_a_frame_ends_and_never_lies() {
    let mut reasons = std::collections::BTreeSet::new();
    for seed in 0..30 {
        let mut world = World::new(seed, FAIR, [compatible(), small()]);
        assert!(world.run(MINUTES, World::is_open));
        world.weather = Weather { loss: 3, ..FAIR };
        let max = if seed % 2 == 0 { 100 } else { 60_000 };
        let sent = messages(&mut Random::new(seed), 300, max);
        // One by one, or short ones would share few records.
        for message in &sent {
            if world.ends[HARNESS].closed.is_none() {
                world.ends[HARNESS].to_send.push_back(message.clone());
                world.step();
            }
        }
        world.run(MINUTES, |world| world.ends[EXECUTOR].closed.is_some());
        let end = &world.ends[EXECUTOR];
        assert!(
            end.received.iter().eq(sent.iter().take(end.received.len())),
            "seed {seed}"
        );
        if end.received.len() < 300 {
            let (reason, _) = end
                .closed
                .clone()
                .expect("a gap is not waited for without end");
            reasons.insert(reason.to_string());
        }
        assert!(
            world.ends[HARNESS].to_send.is_empty(),
            "seed {seed}: the sender never stalls"
        );
        assert!(end.peak < 2 << 20, "seed {seed}: {} bytes", end.peak);
    }
    assert!(
        reasons.contains("gap_timeout") && reasons.contains("reorder_window"),
        "{reasons:?}"
    );
}

#[test]
fn a_compatible_stream_ends_with_its_socket() {
    for at in [HARNESS, EXECUTOR] {
        let mut world = World::new(8, FAIR, [compatible(), small()]);
        assert!(world.run(MINUTES, World::is_open));
        world.cut(at);
        assert!(world.run(MINUTES, |world| {
            world.ends.iter().all(|end| end.closed.is_some())
        }));
        assert_eq!(world.ends[at].closed, Some((Reason::SocketLost, true)));
        let (reason, by_peer) = world.ends[1 - at].closed.clone().unwrap();
        assert!(reason.is_detachment() && by_peer);
    }
}
