//! Progress line on the terminal: of a copy, and of a request that takes long.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_client::transfer::{ProgressFn, TransferProgress};
use exec_server_sync::Mutex;
use rustix::termios::{isatty, tcgetwinsize};

use crate::cli::table::{bytes, visible};

/// Interval between two updates of the line: short enough to show progress, long enough to cost
/// little.
const INTERVAL: Duration = Duration::from_millis(100);

/// The progress line; `None` without a terminal.
pub(super) struct ProgressLine(Option<Arc<Mutex<ProgressState>>>);

struct ProgressState {
    started_at: Instant,
    shown: Option<Instant>,
}

impl ProgressLine {
    pub(super) fn new(quiet: bool) -> Self {
        let shows = !quiet && isatty(rustix::stdio::stderr());
        Self(shows.then(|| {
            Arc::new(Mutex::new(ProgressState {
                started_at: Instant::now(),
                shown: None,
            }))
        }))
    }

    /// Callback for a transfer that redraws the progress line.
    pub(super) fn callback(&self) -> Option<ProgressFn> {
        let line = Arc::clone(self.0.as_ref()?);
        Some(Arc::new(move |progress| {
            let mut line = line.lock();
            let now = Instant::now();
            if line.shown.is_some_and(|shown| now - shown < INTERVAL) {
                return;
            }
            line.shown = Some(now);
            let text = render(progress, now - line.started_at, terminal_width());
            let mut stderr = std::io::stderr().lock();
            let _ = write!(stderr, "\r\x1b[K{text}");
            let _ = stderr.flush();
        }))
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        let Some(line) = &self.0 else {
            return;
        };
        let line = line.lock();
        if line.shown.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// Time after which a request shows that it is still running.
const NOTICE_DELAY: Duration = Duration::from_secs(2);

/// Number of entries that a listing has found so far.
pub(super) type FoundCount = AtomicU64;

/// Waits for a request; on a terminal, shows its title, the time and what it has found once it takes
/// longer than two seconds.
pub(super) async fn with_counter<T>(
    title: &str,
    found: &FoundCount,
    request: impl Future<Output = T>,
) -> T {
    match isatty(rustix::stdio::stderr()) {
        true => {
            count_while(title, found, request, |text| {
                let mut stderr = std::io::stderr().lock();
                let _ = write!(stderr, "\r\x1b[K{text}");
                let _ = stderr.flush();
            })
            .await
        }
        false => request.await,
    }
}

async fn count_while<T>(
    title: &str,
    found: &FoundCount,
    request: impl Future<Output = T>,
    mut show: impl FnMut(&str),
) -> T {
    let mut request = std::pin::pin!(request);
    let started_at = tokio::time::Instant::now();
    let mut ticks = tokio::time::interval_at(started_at + NOTICE_DELAY, Duration::from_millis(500));
    let mut is_shown = false;
    loop {
        tokio::select! {
            biased;
            outcome = &mut request => {
                if is_shown {
                    show("");
                }
                return outcome;
            }
            now = ticks.tick() => {
                is_shown = true;
                let seconds = (now - started_at).as_secs();
                let width = terminal_width();
                let text = match found.load(Ordering::Relaxed) {
                    0 => format!("{title}  {seconds} s"),
                    count => format!("{title}  {count} found  {seconds} s"),
                };
                show(&fitting(&visible(&text), width));
            }
        }
    }
}

fn terminal_width() -> usize {
    tcgetwinsize(rustix::stdio::stderr()).map_or(80, |size| size.ws_col.into())
}

/// Cuts a text to the width of the terminal: a wrapped line cannot be overwritten.
fn fitting(text: &str, width: usize) -> String {
    text.chars().take(width.saturating_sub(1)).collect()
}

fn render(progress: &TransferProgress<'_>, elapsed: Duration, width: usize) -> String {
    const CELLS: u64 = 20;
    let total = progress.total_bytes.max(1);
    let done = progress.bytes.min(total);
    let filled = usize::try_from(done * CELLS / total).unwrap_or(0);
    let empty = usize::try_from(CELLS).unwrap_or(0) - filled;
    let rate = progress.bytes as f64 / elapsed.as_secs_f64().max(0.001);
    let left = Duration::from_secs_f64((total - done) as f64 / rate.max(1.0));
    let name = progress.path.file_name().unwrap_or_default();
    let text = format!(
        "[{}{}] {:3}%  {}/{} files  {}/{}  {}/s  {}:{:02} left  {}",
        "#".repeat(filled),
        "-".repeat(empty),
        done * 100 / total,
        progress.files,
        progress.total_files,
        bytes(progress.bytes),
        bytes(progress.total_bytes),
        bytes(rate as u64),
        left.as_secs() / 60,
        left.as_secs() % 60,
        visible(&name.to_string_lossy()),
    );
    fitting(&text, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_shows_a_counter_after_two_seconds_and_erases_it() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        for (seconds, expected) in [
            (1.9, vec![]),
            (
                2.7,
                vec!["searching  7 found  2 s", "searching  7 found  2 s", ""],
            ),
            (
                3.2,
                vec![
                    "searching  7 found  2 s",
                    "searching  7 found  2 s",
                    "searching  7 found  3 s",
                    "",
                ],
            ),
        ] {
            let mut shown = Vec::new();
            let found = FoundCount::new(7);
            let request = async { tokio::time::sleep(Duration::from_secs_f64(seconds)).await };
            let show = |text: &str| shown.push(text.to_owned());
            runtime.block_on(count_while("searching", &found, request, show));
            assert_eq!(shown, expected, "{seconds}");
        }
    }
}
