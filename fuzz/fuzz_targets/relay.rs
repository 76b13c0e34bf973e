#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| exec_server_relay::fuzz::relay(data));
