//! `exec-server mcp` and `mcp-proxy` from outside: as an MCP client sees them.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod client;
#[cfg(feature = "interop")]
mod clients;
mod commands;
mod faults;
mod files;
mod http;
mod places;
mod proxy;
mod replay;

/// A file that is not declared here would silently not be tested.
#[test]
fn every_file_is_a_module() {
    let declared = include_str!("main.rs");
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mcp")).unwrap();
    let mut seen = 0;
    for file in files {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        seen += 1;
        let is_declared = declared.contains(&format!("\nmod {name};\n"));
        assert!(name == "main" || is_declared, "{name} is not declared");
    }
    assert!(seen > 1);
}
