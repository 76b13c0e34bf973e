//! Counters and gauges, and the Prometheus text format.
//!
//! The `metrics` modules of `service` and `rendezvous` define which metrics exist.

use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counter or gauge; an update costs one atomic addition.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds an amount.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Subtracts an amount; for gauges only.
    pub fn sub(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Returns the current value.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds one until the returned guard is dropped.
    pub fn hold(&self) -> CounterGuard<'_> {
        self.add(1);
        CounterGuard(self)
    }
}

/// Guard that subtracts one on drop.
#[derive(Debug)]
pub struct CounterGuard<'a>(&'a Counter);

impl Drop for CounterGuard<'_> {
    fn drop(&mut self) {
        self.0.sub(1);
    }
}

/// Writer of the Prometheus text format.
#[derive(Debug)]
pub struct PrometheusText {
    prefix: &'static str,
    text: String,
}

impl PrometheusText {
    /// Creates an empty page; all metric names on it begin with `prefix`.
    pub fn new(prefix: &'static str) -> Self {
        Self {
            prefix,
            text: String::with_capacity(16 * 1024),
        }
    }

    /// Writes the help and type lines of a metric family; call it before writing its samples.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        let prefix = self.prefix;
        let _ = writeln!(self.text, "# HELP {prefix}{name} {help}");
        let _ = writeln!(self.text, "# TYPE {prefix}{name} {kind}");
    }

    /// Writes one sample; `labels` are in braces, or empty.
    pub fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.text, "{}{name}{labels} {value}", self.prefix);
    }

    /// Writes a family with one sample without labels.
    pub fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    /// Writes a family of counters that differ in one label.
    pub fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        counters: impl IntoIterator<Item = (&'a str, &'a Counter)>,
    ) {
        self.family(name, "counter", help);
        for (value, counter) in counters {
            self.sample(name, &format!("{{{label}=\"{value}\"}}"), counter.value());
        }
    }

    /// Returns the complete text.
    pub fn into_text(self) -> String {
        self.text
    }
}

/// Escapes a text for use as a label value.
pub fn label(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_holds_families_samples_and_escaped_labels() {
        let counter = Counter::default();
        counter.add(3);
        drop(counter.hold());
        let mut page = PrometheusText::new("x_");
        page.single("up", "gauge", "Whether it is up.", 1);
        page.counters("ends_total", "Ends.", "cause", [("a", &counter)]);
        assert_eq!(
            page.into_text(),
            "# HELP x_up Whether it is up.\n# TYPE x_up gauge\nx_up 1\n\
             # HELP x_ends_total Ends.\n# TYPE x_ends_total counter\n\
             x_ends_total{cause=\"a\"} 3\n"
        );
        assert_eq!(label("a\\b\"c\nd"), "a\\\\b\\\"c\\nd");
    }
}
