//! ARCHITECTURE.md: its length, and the crates and tests that it names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Longest page that a reader finishes.
const MAX_LINES: usize = 150;

#[test]
fn architecture_names_existing_crates_and_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let lines = page.lines().count();
    assert!(lines <= MAX_LINES, "{lines} lines, more than {MAX_LINES}");

    let listed: Vec<&str> = section(&page, "## Crates")
        .lines()
        .skip_while(|line| !line.starts_with("    "))
        .map_while(|line| line.strip_prefix("    "))
        .filter_map(|line| line.split(' ').next())
        .collect();
    let exist: BTreeSet<String> = fs::read_dir(root.join("crates"))
        .expect("crates")
        .map(|entry| {
            let name = entry.expect("crates").file_name();
            name.into_string().expect("UTF-8")
        })
        .collect();
    let unique: BTreeSet<String> = listed.iter().map(|&name| name.to_owned()).collect();
    assert_eq!(unique, exist);
    assert_eq!(listed.len(), exist.len(), "a crate is listed twice");

    let named = code_in_column(section(&page, "## Invariants"), 1);
    assert!(named.len() > 10, "{named:?}");
    let mut sources = String::new();
    read(&root.join("crates"), &mut sources);
    let missing: Vec<&String> = named
        .iter()
        .filter(|name| !sources.contains(&format!("fn {name}(")))
        .collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
}

/// The text from a heading to the next one of its level.
pub(crate) fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, rest) = page.split_once(heading).expect(heading);
    rest.split("\n## ").next().unwrap_or(rest)
}

/// Code in a column of a table that could be the name of a test; the first column is 0.
pub(crate) fn code_in_column(table: &str, column: usize) -> BTreeSet<String> {
    table
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").nth(column))
        .flat_map(|column| column.split('`').skip(1).step_by(2))
        .filter(|code| {
            code.contains('_')
                && code
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        })
        .map(str::to_owned)
        .collect()
}

/// Appends every Rust file below a directory.
pub(crate) fn read(directory: &Path, sources: &mut String) {
    let entries = fs::read_dir(directory).expect("directory");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("entry").path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            read(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&fs::read_to_string(&path).expect("source"));
        }
    }
}
