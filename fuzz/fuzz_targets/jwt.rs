#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| exec_server_transport::fuzz::jwt(data));
