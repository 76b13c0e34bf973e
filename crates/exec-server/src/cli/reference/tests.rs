//! `docs/cli.md`: the help of all commands, on one page. A test compares it; `UPDATE_DOCS=1` writes it.

use std::fmt::Write as _;

use super::parse::definition;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md");

const HEAD: &str = "\
# The command line

`exec-server COMMAND --help` prints the same. This page is written from the definitions in
`crates/exec-server/src/cli/args.rs`: `UPDATE_DOCS=1 cargo test -p exec-server --lib reference` writes it anew.
";

/// Adds a command, and those below it.
fn describe(command: &clap::Command, name: &str, page: &mut String) {
    let mut shown = command.clone().bin_name(name).term_width(100);
    let help = shown.render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    let help = lines.join("\n");
    let _ = write!(page, "\n## {name}\n\n```text\n{}\n```\n", help.trim());
    for below in command.get_subcommands() {
        if !below.is_hide_set() && below.get_name() != "help" {
            describe(below, &format!("{name} {}", below.get_name()), page);
        }
    }
}

#[test]
fn cli_reference_is_up_to_date() {
    let mut root = definition().term_width(100);
    root.build();
    let mut page = HEAD.to_owned();
    describe(&root, "exec-server", &mut page);
    if std::env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        std::fs::write(DOCUMENT, &page).unwrap();
    }
    let written = std::fs::read_to_string(DOCUMENT).unwrap_or_default();
    let differs = page
        .lines()
        .zip(written.lines())
        .find(|(one, other)| one != other);
    assert!(
        page == written,
        "docs/cli.md is not up to date at {differs:?}: UPDATE_DOCS=1 cargo test -p exec-server --lib \
         reference"
    );
    assert!(page.matches("\n## exec-server").count() > 40);
}
