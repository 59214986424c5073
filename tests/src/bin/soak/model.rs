//! What the balancer is configured to be: the services of the soak, and what has become of their backends.

use balancer_tests::topology::{VIP, backend_address};

/// How many backends each service has. The first is left in peace, so that there is always one to go to.
pub const BACKENDS: u8 = 5;
/// Where each backend's health is asked for.
pub const HEALTH_PORT: u16 = 9000;

/// A service under load.
pub struct Service {
    /// Its name.
    pub name: &'static str,
    /// `tcp` or `udp`.
    pub protocol: &'static str,
    /// Its method.
    pub method: &'static str,
    /// Where clients find it.
    pub port: u16,
    /// Where its backends listen.
    pub backend_port: u16,
}

/// All of them.
pub const SERVICES: [Service; 4] = [
    Service { name: "load", protocol: "tcp", method: "least-packets", port: 80, backend_port: 8080 },
    Service { name: "hash", protocol: "tcp", method: "maglev", port: 81, backend_port: 8081 },
    Service { name: "turn", protocol: "udp", method: "round-robin", port: 80, backend_port: 8080 },
    Service { name: "bytes", protocol: "udp", method: "least-bandwidth", port: 82, backend_port: 8082 },
];

/// Which backends there are, with their weights: by service, then by number - 1.
#[derive(Clone)]
pub struct Model {
    weights: [[Option<u8>; BACKENDS as usize]; SERVICES.len()],
}

impl Model {
    /// All backends, alike.
    pub fn new() -> Model {
        Model { weights: [[Some(1); BACKENDS as usize]; SERVICES.len()] }
    }

    /// Whether a backend is configured.
    pub fn has(&self, service: usize, backend: u8) -> bool {
        self.weights[service][usize::from(backend) - 1].is_some()
    }

    /// Gives a backend a weight; `None` takes it out.
    pub fn set(&mut self, service: usize, backend: u8, weight: Option<u8>) {
        self.weights[service][usize::from(backend) - 1] = weight;
    }

    /// The configuration file. All timeouts are short, so that a soak of a minute sees them pass.
    pub fn text(&self) -> String {
        let mut text = String::from(
            "[daemon]\ninterfaces = [\"lc\", \"lk\"]\nhalf-open-timeout = \"5s\"\nclosing-timeout = \"5s\"\n",
        );
        for (service, weights) in SERVICES.iter().zip(&self.weights) {
            let Service { name, protocol, method, port, .. } = service;
            text.push_str(&format!(
                "\n[[service]]\nname = \"{name}\"\naddress = \"{VIP}:{port}\"\nprotocol = \"{protocol}\"\n\
                 method = \"{method}\"\nidle-timeout = \"10s\"\ndrain-timeout = \"6s\"\n\
                 health = {{ kind = \"tcp\", port = {HEALTH_PORT}, interval = \"300ms\", timeout = \"250ms\", rise = 2, \
                 fall = 2 }}\n"
            ));
            for (number, weight) in (1..).zip(weights) {
                let Some(weight) = weight else { continue };
                text.push_str(&format!(
                    "\n[[service.backend]]\nname = \"b{number}\"\naddress = \"{}:{}\"\nweight = {weight}\n",
                    backend_address(number),
                    service.backend_port
                ));
            }
        }
        text
    }
}
