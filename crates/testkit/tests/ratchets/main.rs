//! Rules about the structure of the workspace, with today's exceptions, which may only become fewer.
//!
//! `edges` reads `cargo metadata` and `cargo tree`: which crate may depend on which. `bans` reads the sources of the
//! product: which files may use `std::fs`, `std::env` and error codes of the wire. `names` reads the names of types,
//! `packages` what is published of each crate. `architecture` and `promises` read the tests that pages name. `failures`
//! reads where security code discards errors. `size` reads the length of files and functions,
//! and the imports between modules.
//! The remaining ratchets are not tests: `scripts/plain` (wording) and `scripts/deny` (dependencies).
//!
//! The bans are counted here and not by clippy's `disallowed-methods` for three reasons: almost 200 uses of today would
//! each need an attribute; an attribute can be added anywhere without touching a list that a reviewer reads; and clippy
//! cannot find numbers and constants.

mod architecture;
mod bans;
mod edges;
mod failures;
mod names;
mod packages;
mod promises;
mod size;
