//! Report of the figures, as a table and as JSON.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Value, json};

/// Unit of a figure; figures are in seconds, bytes, or their inverse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Unit {
    /// Time, shown in microseconds or milliseconds.
    Seconds,
    /// Memory, shown in KiB or MiB.
    Bytes,
    /// Throughput, shown in MiB/s.
    BytesPerSecond,
    /// Frequency.
    PerSecond,
    /// A number without a unit; less is better.
    Number,
}

impl Unit {
    /// Whether more is better.
    fn more_is_better(self) -> bool {
        matches!(self, Self::BytesPerSecond | Self::PerSecond)
    }

    fn show(self, value: f64) -> String {
        const KIB: f64 = 1024.0;
        const MIB: f64 = KIB * KIB;
        match self {
            Self::Seconds if value < 1e-3 => format!("{:.1} us", value * 1e6),
            Self::Seconds => format!("{:.2} ms", value * 1e3),
            Self::Bytes if value.abs() < MIB => format!("{:.1} KiB", value / KIB),
            Self::Bytes => format!("{:.1} MiB", value / MIB),
            Self::BytesPerSecond => format!("{:.0} MiB/s", value / MIB),
            Self::PerSecond => format!("{value:.0} /s"),
            Self::Number => format!("{value:.2}"),
        }
    }
}

/// One measured figure and its base.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figure {
    /// The measured value.
    pub(crate) value: f64,
    /// The floor in the same run, or the same figure of the same server without load.
    pub(crate) base: Option<f64>,
}

impl Figure {
    /// Creates a figure without a base.
    pub(crate) fn plain(value: f64) -> Self {
        Self { value, base: None }
    }

    /// Creates a figure that is judged by its ratio to a base.
    pub(crate) fn against(value: f64, base: f64) -> Self {
        Self {
            value,
            base: Some(base),
        }
    }

    /// Returns the better of two, by the ratio to its own base, or by value without a base.
    pub(crate) fn better(self, other: Self, unit: Unit) -> Self {
        let score = |figure: Self| figure.ratio().unwrap_or(figure.value);
        if (score(other) < score(self)) == unit.more_is_better() {
            self
        } else {
            other
        }
    }

    fn ratio(self) -> Option<f64> {
        self.base.map(|base| self.value / base)
    }
}

/// Goal of a figure; its unit decides whether it is an upper or a lower limit.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase", tag = "of")]
pub(crate) enum Goal {
    /// Ratio to its base.
    Base {
        /// Required limit.
        limit: f64,
        /// Desired limit.
        aim: f64,
    },
    /// Ratio to its base, not required.
    DesiredBase {
        /// Desired limit.
        aim: f64,
    },
    /// Ratio to the peer; undecided without a peer.
    Peer {
        /// Required limit.
        limit: f64,
    },
    /// A value or a ratio to the peer; one of them is required.
    Either {
        /// The value.
        value: f64,
        /// The ratio to the peer.
        peer: f64,
    },
    /// A value.
    Value {
        /// Required limit.
        limit: f64,
        /// Desired limit.
        aim: f64,
    },
}

/// Result of comparing a figure with a goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum GoalVerdict {
    /// The required goal is missed, or there is no figure.
    Miss,
    /// The required goal is reached.
    Pass,
    /// The desired goal is reached.
    Aim,
}

/// Figure of one side, or its failure.
pub(crate) type FigureOutcome = Result<Figure, String>;

/// One row of the table.
#[derive(Debug, Clone)]
pub(crate) struct ReportRow {
    /// Name of the measurement.
    pub(crate) name: String,
    /// How it is counted.
    pub(crate) unit: Unit,
    /// Name of the base; empty without one.
    pub(crate) base: &'static str,
    /// Goals of the server's figure.
    pub(crate) goals: Vec<Goal>,
    /// The server under test.
    pub(crate) server: FigureOutcome,
    /// The peer, if there is one.
    pub(crate) peer: Option<FigureOutcome>,
}

impl ReportRow {
    /// Returns the worst verdict over all goals that can be judged; `None` without goals.
    pub(crate) fn verdict(&self) -> Option<GoalVerdict> {
        self.goals.iter().filter_map(|goal| self.judge(goal)).min()
    }

    fn judge(&self, goal: &Goal) -> Option<GoalVerdict> {
        let Ok(figure) = &self.server else {
            return Some(GoalVerdict::Miss);
        };
        let (seen, limit, aim, more) = match *goal {
            Goal::Base { limit, aim } => (figure.ratio()?, limit, aim, self.unit.more_is_better()),
            Goal::DesiredBase { aim } => {
                let hopeless = if self.unit.more_is_better() {
                    0.0
                } else {
                    f64::INFINITY
                };
                (figure.ratio()?, hopeless, aim, self.unit.more_is_better())
            }
            Goal::Value { limit, aim } => (figure.value, limit, aim, self.unit.more_is_better()),
            Goal::Peer { limit } => (self.better_than_peer()?, limit, limit, true),
            Goal::Either { value, peer } => {
                let more = self.unit.more_is_better();
                match self.better_than_peer() {
                    Some(times) if times >= peer => (times, peer, peer, true),
                    _ => (figure.value, value, value, more),
                }
            }
        };
        let reaches = |bound: f64| if more { seen >= bound } else { seen <= bound };
        Some(match (reaches(limit), reaches(aim)) {
            (true, true) if aim != limit => GoalVerdict::Aim,
            (true, _) => GoalVerdict::Pass,
            (false, _) => GoalVerdict::Miss,
        })
    }

    /// Ratio of server to peer; above 1 the server is better.
    fn better_than_peer(&self) -> Option<f64> {
        let (Ok(server), Some(Ok(peer))) = (&self.server, &self.peer) else {
            return None;
        };
        Some(if self.unit.more_is_better() {
            server.value / peer.value
        } else {
            peer.value / server.value
        })
    }

    fn goals_text(&self) -> String {
        let sign = if self.unit.more_is_better() {
            ">="
        } else {
            "<="
        };
        let mut text = String::new();
        for goal in &self.goals {
            if !text.is_empty() {
                text.push_str(", ");
            }
            // Writing to a string cannot fail.
            let _ = match *goal {
                Goal::Base { limit, aim } if limit == aim => write!(text, "{sign} {limit}x"),
                Goal::Base { limit, aim } => write!(text, "{sign} {limit}x ({aim}x)"),
                Goal::DesiredBase { aim } => write!(text, "({aim}x)"),
                Goal::Peer { limit } => write!(text, ">= {limit}x peer"),
                Goal::Either { value, peer } => {
                    write!(text, "{sign} {} or >= {peer}x peer", self.unit.show(value))
                }
                Goal::Value { limit, aim } if limit == aim => {
                    write!(text, "{sign} {}", self.unit.show(limit))
                }
                Goal::Value { limit, aim } => {
                    write!(
                        text,
                        "{sign} {} ({})",
                        self.unit.show(limit),
                        self.unit.show(aim)
                    )
                }
            };
        }
        text
    }

    fn cells(&self) -> [String; 9] {
        let times = |ratio: Option<f64>| ratio.map(|r| format!("{r:.2}x")).unwrap_or_default();
        let value = |outcome: &FigureOutcome| match outcome {
            Ok(figure) => self.unit.show(figure.value),
            Err(_) => "failed".to_owned(),
        };
        let server = self.server.as_ref().ok();
        let peer = self.peer.as_ref().and_then(|peer| peer.as_ref().ok());
        let base = match server.or(peer).and_then(|figure| figure.base) {
            Some(base) => format!("{} {}", self.unit.show(base), self.base),
            None => String::new(),
        };
        let verdict = match self.verdict() {
            None => "",
            Some(GoalVerdict::Miss) => "MISS",
            Some(GoalVerdict::Pass) => "pass",
            Some(GoalVerdict::Aim) => "pass+",
        };
        [
            self.name.clone(),
            times(server.and_then(|figure| figure.ratio())),
            self.goals_text(),
            verdict.to_owned(),
            value(&self.server),
            base,
            self.peer.as_ref().map(value).unwrap_or_default(),
            times(peer.and_then(|figure| figure.ratio())),
            times(self.better_than_peer()),
        ]
    }

    fn notes(&self) -> Vec<String> {
        let failed = |who: &str, outcome: &FigureOutcome| {
            outcome
                .as_ref()
                .err()
                .map(|reason| format!("{}: {who} failed: {reason}", self.name))
        };
        [
            failed("server", &self.server),
            self.peer.as_ref().and_then(|peer| failed("peer", peer)),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Returns the rows as JSON: figures in seconds, bytes or per second, with ratios and verdicts.
pub(crate) fn json(rows: &[ReportRow]) -> Value {
    let outcome = |outcome: &FigureOutcome| match outcome {
        Ok(figure) => {
            json!({ "value": figure.value, "base": figure.base, "ratio": figure.ratio() })
        }
        Err(reason) => json!({ "error": reason }),
    };
    let row = |row: &ReportRow| {
        json!({
            "name": row.name,
            "unit": row.unit,
            "base": row.base,
            "goals": row.goals,
            "verdict": row.verdict(),
            "server": outcome(&row.server),
            "peer": row.peer.as_ref().map(outcome),
            "betterThanPeer": row.better_than_peer(),
        })
    };
    rows.iter().map(row).collect()
}

/// Returns the table, with notes below it.
pub(crate) fn table(rows: &[ReportRow], with_peer: bool) -> String {
    const TITLES: [&str; 9] = [
        "scenario", "ratio", "target", "", "server", "floor", "peer", "ratio", "better",
    ];
    let columns = if with_peer {
        TITLES.len()
    } else {
        TITLES.len() - 3
    };
    let mut lines = vec![TITLES.map(str::to_owned)];
    lines.extend(rows.iter().map(ReportRow::cells));
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            lines
                .iter()
                .map(|line| line[column].len())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for (index, line) in lines.iter().enumerate() {
        let mut shown = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(shown, "{cell:<width$}  ");
        }
        text.push_str(shown.trim_end());
        text.push('\n');
        if index == 0 {
            text.push_str(&"-".repeat(widths.iter().map(|width| width + 2).sum::<usize>() - 2));
            text.push('\n');
        }
    }
    let notes: Vec<String> = rows.iter().flat_map(ReportRow::notes).collect();
    if !notes.is_empty() {
        text.push('\n');
        for note in notes {
            let _ = writeln!(text, "{note}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(unit: Unit, goals: Vec<Goal>, server: Figure, peer: Option<f64>) -> ReportRow {
        ReportRow {
            name: "x".to_owned(),
            unit,
            base: "floor",
            goals,
            server: Ok(server),
            peer: peer.map(|value| Ok(Figure::plain(value))),
        }
    }

    #[test]
    fn verdict_depends_on_the_direction_of_the_unit() {
        let goal = Goal::Base {
            limit: 1.7,
            aim: 1.3,
        };
        let slow = |value| row(Unit::Seconds, vec![goal], Figure::against(value, 1.0), None);
        assert_eq!(slow(1.2).verdict(), Some(GoalVerdict::Aim));
        assert_eq!(slow(1.5).verdict(), Some(GoalVerdict::Pass));
        assert_eq!(slow(1.8).verdict(), Some(GoalVerdict::Miss));
        let goal = Goal::Base {
            limit: 0.7,
            aim: 0.9,
        };
        let rate = |value| {
            row(
                Unit::PerSecond,
                vec![goal],
                Figure::against(value, 1.0),
                None,
            )
        };
        assert_eq!(rate(1.0).verdict(), Some(GoalVerdict::Aim));
        assert_eq!(rate(0.6).verdict(), Some(GoalVerdict::Miss));
    }

    #[test]
    fn verdict_is_the_worst_goal_without_absent_peers() {
        let goals = vec![
            Goal::Peer { limit: 2.0 },
            Goal::Base {
                limit: 0.35,
                aim: 0.35,
            },
        ];
        let figure = Figure::against(4.0, 10.0);
        let verdict = |peer| row(Unit::BytesPerSecond, goals.clone(), figure, peer).verdict();
        assert_eq!(verdict(None), Some(GoalVerdict::Pass));
        assert_eq!(verdict(Some(1.0)), Some(GoalVerdict::Pass));
        assert_eq!(verdict(Some(3.0)), Some(GoalVerdict::Miss));
    }

    #[test]
    fn failed_row_misses_only_if_it_has_goals() {
        let mut failed = row(Unit::Seconds, vec![], Figure::plain(1.0), None);
        failed.server = Err("gone".to_owned());
        assert_eq!(failed.verdict(), None);
        failed.goals.push(Goal::Value {
            limit: 1.0,
            aim: 1.0,
        });
        assert_eq!(failed.verdict(), Some(GoalVerdict::Miss));
        assert!(table(&[failed], false).contains("x: server failed: gone"));
    }
}
