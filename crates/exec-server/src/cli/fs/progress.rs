//! Progress line of a copy on the terminal.

use std::io::Write as _;
use std::sync::Arc;
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
            let width = tcgetwinsize(rustix::stdio::stderr()).map_or(80, |size| size.ws_col.into());
            let text = render(progress, now - line.started_at, width);
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
    // The line must fit the width of the terminal: a wrapped line cannot be overwritten.
    text.chars().take(width.saturating_sub(1)).collect()
}
