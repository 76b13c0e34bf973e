//! Counters, and the text format in which Prometheus reads them.
//!
//! Which numbers there are is defined in the `metrics` modules of `service` and `rendezvous`.

use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that costs one atomic addition to change.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Subtracts from it, where it counts what there is now.
    pub fn sub(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Its value.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts one until the guard is dropped.
    pub fn hold(&self) -> Held<'_> {
        self.add(1);
        Held(self)
    }
}

/// One more, until dropped.
#[derive(Debug)]
pub struct Held<'a>(&'a Counter);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.sub(1);
    }
}

/// Writes the text that Prometheus reads.
#[derive(Debug)]
pub struct Page {
    prefix: &'static str,
    text: String,
}

impl Page {
    /// An empty page. Every name on it begins with `prefix`.
    pub fn new(prefix: &'static str) -> Self {
        Self {
            prefix,
            text: String::with_capacity(16 * 1024),
        }
    }

    /// Announces a family, before its samples.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        let prefix = self.prefix;
        let _ = writeln!(self.text, "# HELP {prefix}{name} {help}");
        let _ = writeln!(self.text, "# TYPE {prefix}{name} {kind}");
    }

    /// One sample; `labels` stand in braces, or are empty.
    pub fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.text, "{}{name}{labels} {value}", self.prefix);
    }

    /// A family of one sample without labels.
    pub fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    /// A family of counters that differ in one label.
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

    /// The whole text.
    pub fn into_text(self) -> String {
        self.text
    }
}

/// A text as it may stand between the quotes of a label.
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
        let mut page = Page::new("x_");
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
