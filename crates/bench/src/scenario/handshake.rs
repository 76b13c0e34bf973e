//! Time until a server responds: after its start, and after a connection.

use std::time::Instant;

use super::{Bench, RowSpec};
use crate::client::BenchClient;
use crate::floor::{self, WebsocketResponder};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::BenchServer;
use crate::stats::median;

/// From the start of the command to the first open websocket.
pub(super) fn startup(bench: &Bench) -> Vec<ReportRow> {
    let line = RowSpec {
        name: "start-up".to_owned(),
        unit: Unit::Seconds,
        base: "spawn",
        goals: vec![Goal::Value {
            limit: 10e-3,
            aim: 4e-3,
        }],
    };
    bench.measure_each(bench.pick(11, 5), line, |command| {
        let floor = floor::spawn(20)?;
        let start = Instant::now();
        let server = BenchServer::start(command)?;
        BenchClient::connect(server.address)?;
        Ok(Figure::against(start.elapsed().as_secs_f64(), floor))
    })
}

/// Connection, upgrade and the response to `initialize`.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let count = 40;
    let line = RowSpec {
        name: "handshake p50".to_owned(),
        unit: Unit::Seconds,
        base: "bare upgrade",
        goals: vec![Goal::Base {
            limit: 2.0,
            aim: 2.0,
        }],
    };
    let floor = || WebsocketResponder::start(&bench.own, None)?.handshake(count);
    bench.placed_rounds(bench.pick(13, 5), vec![line], floor, |server, &floor| {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            let mut client = BenchClient::connect(server.address)?;
            client.initialize()?;
            samples.push(start.elapsed().as_secs_f64());
            drop(client);
            floor::pause();
        }
        Ok(vec![Figure::against(median(&samples), floor)])
    })
}
