//! Seeded simulations of both modes on an unreliable network; a failure prints its seed.

#![allow(clippy::unwrap_used, reason = "helper functions of tests, too")]

mod support;

use std::time::Duration;

use bytes::Bytes;
use exec_server_relay::{EndReason, EndpointLimits, Mode};
use support::*;

const MINUTES: Duration = Duration::from_secs(30 * 60);

fn small() -> EndpointLimits {
    let mut limits = EndpointLimits::default();
    limits.send_bytes = 256 << 10;
    limits.receive_bytes = 512 << 10;
    // With heavy loss a handshake may take long.
    limits.handshake = Duration::from_secs(60);
    limits.confirmation = Duration::from_secs(60);
    limits.linger = Duration::from_secs(120);
    limits
}

fn compatible() -> EndpointLimits {
    let mut limits = small();
    limits.acknowledge = false;
    limits
}

/// Sends messages in both directions and checks that each arrives once, in order.
fn exactly_once(seed: u64, simulation: &mut Simulation, count: usize, max: u64) {
    let mut random = XorshiftRandom::new(seed + 1000);
    let sent = [HARNESS, EXECUTOR].map(|_| messages(&mut random, count, max));
    for (end, sent) in simulation.ends.iter_mut().zip(&sent) {
        end.to_send = sent.clone();
    }
    let done = simulation.run(MINUTES, |simulation| {
        simulation
            .ends
            .iter()
            .all(|end| end.received.len() >= count || end.closed.is_some())
    });
    for at in [HARNESS, EXECUTOR] {
        assert_eq!(
            simulation.ends[at].closed, None,
            "seed {seed}: end {at} closed"
        );
    }
    assert!(done, "seed {seed}: not all arrived");
    for at in [HARNESS, EXECUTOR] {
        let (received, sent) = (&simulation.ends[at].received, &sent[1 - at]);
        assert!(
            received.iter().eq(sent),
            "seed {seed}: end {at} got something else"
        );
        // Queue, one window, records behind a gap, and the incomplete message.
        let bound = (256 << 10) + max as usize + 2 * 64 * 61_456 + (512 << 10) + max as usize;
        assert!(
            simulation.ends[at].peak < bound,
            "seed {seed}: {} bytes",
            simulation.ends[at].peak
        );
    }
}

fn heavy_faults() -> NetworkFaults {
    NetworkFaults {
        loss: 30,
        duplication: 15,
        delayed_percent: 40,
        max_extra_delay: Duration::from_millis(400),
        ..NO_FAULTS
    }
}

#[test]
fn reliable_messages_arrive_once_under_heavy_loss() {
    for seed in 0..40 {
        let mut simulation = Simulation::new(seed, heavy_faults(), [small(), small()]);
        exactly_once(seed, &mut simulation, 60, 100_000);
        assert_eq!(simulation.ends[HARNESS].mode, Some(Mode::Reliable));
    }
}

#[test]
fn reliable_messages_arrive_when_reordered_beyond_the_window() {
    for seed in 0..10 {
        let faults = NetworkFaults {
            delayed_percent: 10,
            max_extra_delay: Duration::from_secs(2),
            ..NO_FAULTS
        };
        let mut simulation = Simulation::new(seed, faults, [small(), small()]);
        exactly_once(seed, &mut simulation, 400, 60_000);
    }
}

#[test]
fn reliable_messages_arrive_when_a_socket_is_cut_at_any_frame() {
    // Without loss, so that every frame is the last one before a cut in one of the runs.
    let mut cuts = 0;
    for at in [HARNESS, EXECUTOR] {
        for reports_detachment in [true, false] {
            for frame in 3.. {
                let faults = NetworkFaults {
                    reports_detachment,
                    ..NO_FAULTS
                };
                let mut simulation = Simulation::new(frame, faults, [small(), small()]);
                simulation.cut_at = Some((frame, at));
                exactly_once(frame, &mut simulation, 16, 300_000);
                if simulation.cut_at.is_some() {
                    break;
                }
                cuts += 1;
            }
        }
    }
    assert!(cuts > 100, "only {cuts} cuts");
}

#[test]
fn socket_cut_before_credit_is_granted_ends_the_stream_without_messages() {
    for at in [HARNESS, EXECUTOR] {
        for frame in [1, 2] {
            let mut simulation = Simulation::new(frame, NO_FAULTS, [small(), small()]);
            simulation.ends[HARNESS]
                .to_send
                .push_back(Bytes::from_static(b"hello"));
            simulation.cut_at = Some((frame, at));
            assert!(simulation.run(MINUTES, |simulation| {
                simulation.ends[HARNESS].closed.is_some()
            }));
            let (reason, _) = simulation.ends[HARNESS].closed.clone().unwrap();
            assert!(reason.is_retryable(), "{reason}");
            assert_eq!(simulation.ends[EXECUTOR].received.len(), 0);
        }
    }
}

#[test]
fn reliable_messages_arrive_under_heavy_loss_and_repeated_cuts() {
    for seed in 0..30 {
        let mut faults = heavy_faults();
        faults.reports_detachment = seed % 2 == 0;
        let mut simulation = Simulation::new(seed, faults, [small(), small()]);
        assert!(simulation.run(MINUTES, Simulation::is_open), "seed {seed}");
        let mut random = XorshiftRandom::new(seed);
        let sent = [HARNESS, EXECUTOR].map(|_| messages(&mut random, 60, 150_000));
        for (end, sent) in simulation.ends.iter_mut().zip(&sent) {
            end.to_send = sent.clone();
        }
        let mut cuts = 0;
        while simulation
            .ends
            .iter()
            .any(|end| end.received.len() < 60 && end.closed.is_none())
        {
            assert!(
                simulation.elapsed() < MINUTES,
                "seed {seed}: not all arrived"
            );
            if random.below(12) == 0 && cuts < 40 {
                cuts += 1;
                simulation.cut(random.below(2) as usize);
            }
            simulation.step();
        }
        for at in [HARNESS, EXECUTOR] {
            assert_eq!(simulation.ends[at].closed, None, "seed {seed}");
            assert!(
                simulation.ends[at].received.iter().eq(&sent[1 - at]),
                "seed {seed}"
            );
        }
        assert!(cuts > 5, "seed {seed}: {cuts} cuts");
    }
}

#[test]
fn resume_after_cut_takes_a_round_trip_and_no_handshake() {
    let mut simulation = Simulation::new(1, NO_FAULTS, [small(), small()]);
    assert!(simulation.run(MINUTES, Simulation::is_open));
    simulation.outage = Duration::ZERO;
    simulation.cut(HARNESS);
    simulation.ends[HARNESS]
        .to_send
        .push_back(Bytes::from_static(b"still there?"));
    let before = simulation.now;
    assert!(simulation.run(MINUTES, |simulation| {
        !simulation.ends[EXECUTOR].received.is_empty()
    }));
    let outage = simulation.now - before;
    assert!(
        outage < Duration::from_millis(250),
        "{outage:?}, of which up to 200 without a socket"
    );
}

#[test]
fn slow_reader_holds_back_its_sender() {
    let mut simulation = Simulation::new(2, NO_FAULTS, [small(), small()]);
    assert!(simulation.run(MINUTES, Simulation::is_open));
    simulation.ends[EXECUTOR].reads = 0;
    let message = Bytes::from(vec![7; 10_000]);
    simulation.ends[HARNESS].to_send = std::iter::repeat_n(message, 1000).collect();
    simulation.run(Duration::from_secs(30), |_| false);
    assert!(
        simulation.ends[EXECUTOR].peak < (512 << 10) + 100_000,
        "{}",
        simulation.ends[EXECUTOR].peak
    );
    assert!(
        simulation.ends[HARNESS].to_send.len() > 800,
        "the rest waits with the application"
    );
    assert_eq!(simulation.ends[EXECUTOR].closed, None);
    let idle = simulation.ends[HARNESS].transmitted;
    simulation.run(Duration::from_secs(20), |_| false);
    assert!(
        simulation.ends[HARNESS].transmitted - idle < 30,
        "waiting is quiet"
    );
    simulation.ends[EXECUTOR].reads = usize::MAX;
    assert!(simulation.run(
        MINUTES,
        |simulation| simulation.ends[EXECUTOR].received.len() == 1000
    ));
}

#[test]
fn lost_credit_frame_does_not_stall_the_stream() {
    for seed in 0..10 {
        let faults = NetworkFaults {
            loss: 50,
            ..NO_FAULTS
        };
        let mut limits = small();
        limits.receive_bytes = 16 << 10;
        let mut simulation = Simulation::new(seed, faults, [limits.clone(), limits]);
        simulation.ends[EXECUTOR].reads = 1;
        exactly_once(seed, &mut simulation, 100, 8_000);
    }
}

#[test]
fn message_longer_than_every_buffer_arrives() {
    let mut simulation = Simulation::new(3, NO_FAULTS, [small(), small()]);
    let message = Bytes::from(vec![9; 20 << 20]);
    simulation.ends[HARNESS].to_send.push_back(message.clone());
    assert!(simulation.run(MINUTES, |simulation| {
        !simulation.ends[EXECUTOR].received.is_empty()
    }));
    assert_eq!(simulation.ends[EXECUTOR].received[0], message);
}

#[test]
fn idle_stream_stays_open_and_vanished_peer_times_out() {
    let mut simulation = Simulation::new(4, NO_FAULTS, [small(), small()]);
    assert!(simulation.run(MINUTES, Simulation::is_open));
    simulation.ends[HARNESS]
        .to_send
        .push_back(Bytes::from_static(b"hello"));
    simulation.run(Duration::from_secs(600), |_| false);
    assert!(simulation.ends.iter().all(|end| end.closed.is_none()));
    let quiet = simulation.ends[HARNESS].transmitted;
    simulation.run(Duration::from_secs(100), |_| false);
    assert!(
        (9..12).contains(&(simulation.ends[HARNESS].transmitted - quiet)),
        "one heartbeat in ten seconds"
    );
    simulation.faults.loss = 100;
    let before = simulation.now;
    assert!(simulation.run(MINUTES, |simulation| {
        simulation.ends.iter().all(|end| end.closed.is_some())
    }));
    assert!(simulation.now - before <= Duration::from_secs(121));
    for end in &simulation.ends {
        assert_eq!(end.closed, Some((EndReason::PeerTimeout, false)));
    }
}

#[test]
fn close_sends_queued_messages_first() {
    for (seed, limits) in [(5, small()), (6, compatible())] {
        let faults = if seed == 5 { heavy_faults() } else { NO_FAULTS };
        let mut simulation = Simulation::new(seed, faults, [small(), limits]);
        assert!(simulation.run(MINUTES, Simulation::is_open));
        // The sender queues exactly as much as the queue accepts.
        let sent: Vec<_> = (0..20).map(|n| Bytes::from(vec![n; 9_000])).collect();
        simulation.ends[HARNESS].to_send = sent.clone().into();
        simulation.step();
        let (now, stream) = (simulation.now, simulation.ends[HARNESS].stream.unwrap());
        simulation.ends[HARNESS].endpoint.close(now, stream);
        let refused = simulation.ends[HARNESS]
            .endpoint
            .send_message(now, stream, sent[0].clone());
        assert!(refused.is_err());
        assert!(simulation.run(MINUTES, |simulation| {
            simulation.ends[HARNESS].closed.is_some()
        }));
        assert_eq!(
            simulation.ends[HARNESS].closed,
            Some((EndReason::Closed, false))
        );
        if seed == 6 {
            assert!(simulation.run(MINUTES, |simulation| {
                simulation.ends[EXECUTOR].closed.is_some()
            }));
            assert_eq!(
                simulation.ends[EXECUTOR].closed,
                Some((EndReason::Closed, true))
            );
        }
        assert_eq!(simulation.ends[EXECUTOR].received, sent, "seed {seed}");
    }
}

// Compatible mode.

#[test]
fn stream_without_credit_uses_the_compatible_wire() {
    for limits in [[compatible(), small()], [small(), compatible()]] {
        let mut simulation = Simulation::new(7, NO_FAULTS, limits.clone());
        let signs = limits[HARNESS].acknowledge;
        simulation.tamper = Some(Box::new(move |_, from, frame| {
            let frame = exec_server_relay::frame::decode(frame).unwrap();
            use exec_server_relay::frame::FrameBody;
            let silent = frame.acks == Default::default();
            assert!(matches!(
                frame.body,
                FrameBody::Data { .. }
                    | FrameBody::Resume { next_seq: 0 }
                    | FrameBody::Handshake { .. }
            ));
            let is_first = matches!(
                frame.body,
                FrameBody::Resume { .. } | FrameBody::Handshake { .. }
            );
            assert!(silent || (signs && from == HARNESS && is_first));
        }));
        exactly_once(7, &mut simulation, 50, 100_000);
        assert_eq!(
            simulation.ends.each_ref().map(|end| end.mode),
            [Some(Mode::Compatible); 2]
        );
        assert!(
            simulation.elapsed() < Duration::from_secs(2),
            "nothing waits for an answer"
        );
        // Sent records are not kept, and no heartbeat is sent.
        assert_eq!(simulation.ends[HARNESS].endpoint.buffered_bytes(), 0);
        let before = simulation.ends[HARNESS].transmitted + simulation.ends[EXECUTOR].transmitted;
        simulation.run(Duration::from_secs(600), |_| false);
        assert_eq!(
            simulation.ends[HARNESS].transmitted + simulation.ends[EXECUTOR].transmitted,
            before
        );
    }
}

#[test]
fn compatible_stream_tolerates_duplicates_and_reordering_within_the_window() {
    for seed in 0..20 {
        let faults = NetworkFaults {
            duplication: 20,
            delayed_percent: 30,
            max_extra_delay: Duration::from_millis(3),
            ..NO_FAULTS
        };
        let mut simulation = Simulation::new(seed, NO_FAULTS, [compatible(), small()]);
        assert!(simulation.run(MINUTES, Simulation::is_open));
        simulation.faults = faults;
        // Sends few enough short messages at a time that at most one window of records is in
        // flight.
        let sent: Vec<_> = (0..200_u32)
            .map(|n| Bytes::from(n.to_be_bytes().to_vec()))
            .collect();
        for message in &sent {
            simulation.ends[HARNESS].to_send.push_back(message.clone());
            simulation.step();
        }
        assert!(
            simulation.run(MINUTES, |simulation| simulation.ends[EXECUTOR]
                .received
                .len()
                == 200),
            "seed {seed}"
        );
        assert_eq!(simulation.ends[EXECUTOR].received, sent, "seed {seed}");
    }
}

#[test]
fn compatible_stream_ends_after_a_lost_frame_without_wrong_messages() {
    let mut reasons = std::collections::BTreeSet::new();
    for seed in 0..30 {
        let mut simulation = Simulation::new(seed, NO_FAULTS, [compatible(), small()]);
        assert!(simulation.run(MINUTES, Simulation::is_open));
        simulation.faults = NetworkFaults {
            loss: 3,
            ..NO_FAULTS
        };
        let max = if seed % 2 == 0 { 100 } else { 60_000 };
        let sent = messages(&mut XorshiftRandom::new(seed), 300, max);
        // One at a time: queued short messages would share a few records.
        for message in &sent {
            if simulation.ends[HARNESS].closed.is_none() {
                simulation.ends[HARNESS].to_send.push_back(message.clone());
                simulation.step();
            }
        }
        simulation.run(MINUTES, |simulation| {
            simulation.ends[EXECUTOR].closed.is_some()
        });
        let end = &simulation.ends[EXECUTOR];
        assert!(
            end.received.iter().eq(sent.iter().take(end.received.len())),
            "seed {seed}"
        );
        if end.received.len() < 300 {
            let (reason, _) = end.closed.clone().expect("the gap timeout ends the stream");
            reasons.insert(reason.to_string());
        }
        assert!(
            simulation.ends[HARNESS].to_send.is_empty(),
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
fn compatible_stream_ends_with_its_socket() {
    for at in [HARNESS, EXECUTOR] {
        let mut simulation = Simulation::new(8, NO_FAULTS, [compatible(), small()]);
        assert!(simulation.run(MINUTES, Simulation::is_open));
        simulation.cut(at);
        assert!(simulation.run(MINUTES, |simulation| {
            simulation.ends.iter().all(|end| end.closed.is_some())
        }));
        assert_eq!(
            simulation.ends[at].closed,
            Some((EndReason::SocketLost, true))
        );
        let (reason, by_peer) = simulation.ends[1 - at].closed.clone().unwrap();
        assert!(reason.is_detachment() && by_peer);
    }
}
