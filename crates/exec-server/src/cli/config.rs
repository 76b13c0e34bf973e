//! `exec-server config`: the settings in force, and where each came from.

use std::fmt::Write as _;
use std::process::ExitCode;

use super::args::ConfigCommand;
use super::print;
use super::settings::Settings;

pub(super) fn run(command: &ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Show { serve, json } => {
            let settings = Settings::resolve(serve)?;
            settings.listen()?;
            let text = if *json {
                as_json(&settings)?
            } else {
                as_text(&settings)
            };
            print(text.as_bytes())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn as_text(settings: &Settings) -> String {
    let mut text = String::new();
    for (key, value) in settings.iter() {
        let name = key.name;
        let (value, origin) = match value {
            Some((value, origin)) => (value.to_string(), origin.to_string()),
            None => ("(not set)".to_owned(), "default".to_owned()),
        };
        let _ = writeln!(text, "{name} = {value}  # {origin}");
    }
    text
}

fn as_json(settings: &Settings) -> anyhow::Result<String> {
    let entries: Vec<_> = settings
        .iter()
        .map(|(key, value)| {
            let (value, origin) = match value {
                Some((value, origin)) => (serde_json::to_value(value)?, origin.to_string()),
                None => (serde_json::Value::Null, "default".to_owned()),
            };
            Ok(serde_json::json!({
                "key": key.name,
                "value": value,
                "origin": origin,
                "variable": key.variable(),
            }))
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(format!("{}\n", serde_json::to_string_pretty(&entries)?))
}
