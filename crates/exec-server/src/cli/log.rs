//! Log lines on standard error, as text or as JSON.

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::Subscriber;

use super::settings::Settings;

/// Handle that changes the log filter.
pub(super) struct LogControl(Box<dyn Fn(EnvFilter) -> anyhow::Result<()> + Send>);

fn filter(settings: &Settings) -> anyhow::Result<EnvFilter> {
    parse(
        "`log.filter`",
        settings.text("log.filter").unwrap_or("error"),
    )
}

fn parse(name: &str, text: &str) -> anyhow::Result<EnvFilter> {
    EnvFilter::builder()
        .parse(text)
        .with_context(|| format!("{name} is `{text}`"))
}

/// Starts logging.
pub(super) fn start(settings: &Settings) -> anyhow::Result<LogControl> {
    let json = settings.text("log.format") == Some("json");
    begin(filter(settings)?, json)
}

/// Like [`start`], with these settings.
pub(super) fn start_with(filter: &str, json: bool) -> anyhow::Result<LogControl> {
    begin(parse("the log filter", filter)?, json)
}

fn begin(filter: EnvFilter, json: bool) -> anyhow::Result<LogControl> {
    let builder = Subscriber::builder()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    if json {
        let builder = builder.json().with_filter_reloading();
        let handle = builder.reload_handle();
        builder.init();
        Ok(LogControl(Box::new(move |filter| {
            Ok(handle.reload(filter)?)
        })))
    } else {
        let builder = builder.with_ansi(false).with_filter_reloading();
        let handle = builder.reload_handle();
        builder.init();
        Ok(LogControl(Box::new(move |filter| {
            Ok(handle.reload(filter)?)
        })))
    }
}

impl LogControl {
    /// Applies the log filter of the settings. The log format does not change.
    pub(super) fn reload(&self, settings: &Settings) -> anyhow::Result<()> {
        (self.0)(filter(settings)?)
    }
}
