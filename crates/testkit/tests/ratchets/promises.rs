//! Tests that docs/security.md names for its promises.

use std::fs;
use std::path::Path;

use crate::architecture::{code_in_column, read, section};

#[test]
fn every_promise_of_the_threat_model_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/security.md")).expect("docs/security.md");
    let table = section(&page, "## Threat model");
    let rows = table.lines().filter(|line| line.starts_with("| "));
    // The first one is the heading.
    let without: Vec<&str> = rows
        .skip(1)
        .filter(|row| code_in_column(row, 2).is_empty())
        .collect();
    assert_eq!(without, Vec::<&str>::new(), "no test holds these promises");
    let named = code_in_column(table, 2);
    assert!(named.len() > 30, "{named:?}");
    let mut sources = String::new();
    read(&root.join("crates"), &mut sources);
    let missing: Vec<&String> = named
        .iter()
        .filter(|name| !sources.contains(&format!("fn {name}(")))
        .collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
}
