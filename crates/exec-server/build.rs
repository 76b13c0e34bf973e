//! How the program is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|found| found == value);
    // At a fixed address: what lies at a random one has to be corrected in some two hundred pages
    // each time the program starts, which is half of what starting it costs. It starts for every
    // `run`, and for every process under a policy. Memory and libraries stay at random addresses.
    if is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
}
