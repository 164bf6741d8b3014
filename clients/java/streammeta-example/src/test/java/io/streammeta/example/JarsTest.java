package io.streammeta.example;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.streammeta.client.StreammetaClient;
import io.streammeta.store.ObjectStore;
import java.io.IOException;
import java.lang.reflect.Constructor;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.net.URISyntaxException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.TreeSet;
import java.util.jar.JarEntry;
import java.util.jar.JarFile;
import java.util.stream.Stream;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The jars as a broker loads them. In a build that stops before the jars there is nothing to test. */
class JarsTest {
    private static final List<String> API = List.of("io/streammeta/client/", "io/streammeta/store/");

    @ParameterizedTest
    @ValueSource(classes = {StreammetaClient.class, ObjectStore.class})
    void everyClassIsUnderTheProduct(Class<?> entrance) throws IOException, URISyntaxException {
        try (JarFile jar = jarOf(entrance)) {
            List<String> foreign = jar.stream()
                    .map(JarEntry::getName)
                    .filter(name -> name.endsWith(".class"))
                    .map(name -> name.replaceFirst("^META-INF/versions/[0-9]+/", ""))
                    .filter(name -> !name.startsWith("io/streammeta/"))
                    .toList();
            assertEquals(List.of(), foreign);
        }
    }

    @ParameterizedTest
    @ValueSource(classes = {StreammetaClient.class, ObjectStore.class})
    void theApiShowsNoRelocatedType(Class<?> entrance) throws IOException, URISyntaxException, ClassNotFoundException {
        TreeSet<String> shown = new TreeSet<>();
        int classes = 0;
        try (JarFile jar = jarOf(entrance)) {
            for (JarEntry entry : jar.stream().toList()) {
                if (isApi(entry.getName())) {
                    Class<?> type = Class.forName(
                            entry.getName().replace(".class", "").replace('/', '.'), false, getClass().getClassLoader());
                    if (Modifier.isPublic(type.getModifiers())) {
                        classes++;
                        addRelocated(type, shown);
                    }
                }
            }
        }
        assertTrue(classes > 5, "no public class was found");
        assertEquals(new TreeSet<>(), shown);
    }

    private static boolean isApi(String name) {
        return name.endsWith(".class")
                && !name.contains("/transport/")
                && !name.contains("Micrometer") // an optional dependency
                && !name.endsWith("package-info.class")
                && API.stream().anyMatch(name::startsWith);
    }

    private static void addRelocated(Class<?> type, TreeSet<String> shown) {
        Stream<Class<?>> ofMethods = Stream.of(type.getDeclaredMethods())
                .filter(method -> isVisible(method.getModifiers()))
                .flatMap((Method method) ->
                        Stream.concat(Stream.of(method.getParameterTypes()), Stream.of(method.getReturnType())));
        Stream<Class<?>> ofConstructors = Stream.of(type.getDeclaredConstructors())
                .filter(constructor -> isVisible(constructor.getModifiers()))
                .flatMap((Constructor<?> constructor) -> Stream.of(constructor.getParameterTypes()));
        Stream.concat(ofMethods, ofConstructors)
                .filter(shownType -> shownType.getName().startsWith("io.streammeta.internal"))
                .forEach(shownType -> shown.add(type.getSimpleName() + " shows " + shownType.getName()));
    }

    private static boolean isVisible(int modifiers) {
        return Modifier.isPublic(modifiers) || Modifier.isProtected(modifiers);
    }

    private static JarFile jarOf(Class<?> entrance) throws IOException, URISyntaxException {
        Path place = Path.of(entrance.getProtectionDomain().getCodeSource().getLocation().toURI());
        assumeTrue(Files.isRegularFile(place), "the classes are not in a jar");
        return new JarFile(place.toFile());
    }
}
